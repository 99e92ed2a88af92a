"""kvstow.testing"""
