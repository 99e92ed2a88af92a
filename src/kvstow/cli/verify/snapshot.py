"""The samples of ``/metrics`` at one moment, and their increments since an earlier one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

from kvstow.cli.verify.client import ServerFault

KVSTOW_PREFIX: Final = "kvstow_"

Labels = tuple[tuple[str, str], ...]


class Snapshot:
    """Samples by name and labels."""

    def __init__(self, samples: Mapping[tuple[str, Labels], float]) -> None:
        self._samples = samples

    @classmethod
    def parse(cls, text: str) -> Snapshot:
        """Reads Prometheus' text format. Negative, infinite and NaN samples are left out."""
        try:
            families = list(text_string_to_metric_families(text))
        except (ValueError, IndexError) as error:
            raise ServerFault("/metrics is not in Prometheus' format") from error
        samples = {}
        for family in families:
            for sample in family.samples:
                if 0 <= sample.value < math.inf:
                    samples[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
        return cls(samples)

    @property
    def has_kvstow(self) -> bool:
        """Whether any sample is kvstow's."""
        return any(name.startswith(KVSTOW_PREFIX) for name, _ in self._samples)

    def total(self, name: str) -> float:
        """The sum of a metric over all labels."""
        return sum(value for (one, _), value in self._samples.items() if one == name)

    def largest(self, name: str) -> float:
        """The largest sample of a metric, or 0 if it has none."""
        return max((value for (one, _), value in self._samples.items() if one == name), default=0.0)

    def sums_by(self, name: str, *labels: str) -> dict[str, float]:
        """A metric's sums other than 0, by the values of ``labels``, joined by spaces."""
        sums: dict[str, float] = {}
        for (one, pairs), value in self._samples.items():
            if one == name and value:
                key = " ".join(dict(pairs).get(label, "") for label in labels)
                sums[key] = sums.get(key, 0.0) + value
        return sums

    def label_values(self, name: str, label: str) -> set[str]:
        """The values that a label of a metric has."""
        return {dict(pairs).get(label, "") for one, pairs in self._samples if one == name}

    def since(self, before: Snapshot) -> Snapshot:
        """The counters' increments. A counter that has become smaller began anew, from 0."""
        increments = {}
        for key, value in self._samples.items():
            earlier = before._samples.get(key, 0.0)
            increments[key] = value - earlier if value >= earlier else value
        return Snapshot(increments)
