"""kvstow.pool.policy"""
