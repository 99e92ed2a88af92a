"""What ``/metrics`` said at one moment, and what changed between two."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

from kvstow.cli.verify.client import ServerFault

OURS: Final = "kvstow_"

Labels = tuple[tuple[str, str], ...]


class Readings:
    """Samples by name and labels."""

    def __init__(self, samples: Mapping[tuple[str, Labels], float]) -> None:
        self._samples = samples

    @classmethod
    def parse(cls, text: str) -> Readings:
        try:
            families = list(text_string_to_metric_families(text))
        except (ValueError, IndexError) as error:
            raise ServerFault("/metrics is not in Prometheus' format") from error
        samples = (
            sample
            for family in families
            for sample in family.samples
            if 0 <= sample.value < math.inf
        )
        return cls(
            {
                (sample.name, tuple(sorted(sample.labels.items()))): sample.value
                for sample in samples
            }
        )

    @property
    def ours(self) -> bool:
        return any(name.startswith(OURS) for name, _ in self._samples)

    def total(self, name: str) -> float:
        return sum(value for (one, _), value in self._samples.items() if one == name)

    def largest(self, name: str) -> float:
        return max((value for (one, _), value in self._samples.items() if one == name), default=0.0)

    def by(self, name: str, *labels: str) -> dict[str, float]:
        """Sums that are not 0, by the values of ``labels``."""
        sums: dict[str, float] = {}
        for (one, pairs), value in self._samples.items():
            if one == name and value:
                key = " ".join(dict(pairs).get(label, "") for label in labels)
                sums[key] = sums.get(key, 0.0) + value
        return sums

    def values(self, name: str, label: str) -> set[str]:
        """Values that a label has."""
        return {dict(pairs).get(label, "") for one, pairs in self._samples if one == name}

    def since(self, before: Readings) -> Readings:
        """Counters' increments. What began anew meanwhile counts from zero."""
        return Readings(
            {
                key: value - before._samples.get(key, 0.0)
                if value >= before._samples.get(key, 0.0)
                else value
                for key, value in self._samples.items()
            }
        )
