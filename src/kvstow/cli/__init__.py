"""kvstow.cli"""
