"""A lower tier: a store behind threads, limits and a breaker, as the owner's thread sees it."""

from kvstow.tier.call import Call
from kvstow.tier.limits import TierLimits, WriteRate
from kvstow.tier.moves import Coder
from kvstow.tier.tier import Tier

__all__ = ["Call", "Coder", "Tier", "TierLimits", "WriteRate"]
