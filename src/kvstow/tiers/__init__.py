"""A lower tier: a store behind threads, limits and a breaker, as the owner's thread sees it."""

from kvstow.backends.limits import TierLimits
from kvstow.tiers.call import Call
from kvstow.tiers.tier import Tier

__all__ = ["Call", "Tier", "TierLimits"]
