"""kvstow.vllm"""
