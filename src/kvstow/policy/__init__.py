"""kvstow.policy"""
