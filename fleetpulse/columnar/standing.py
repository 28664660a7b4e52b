"""How far a key group has come, and by which policies it judges, as JSON has it: in its stored form, and in a snapshot."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fleetpulse.core.coverage import Coverage, Listening
from fleetpulse.core.messages import BRIDGE
from fleetpulse.core.policy import Dated, Policies, from_normalised


def world_to_plain(listening: Listening, policies: Policies) -> dict[str, Any]:
    """Return coverage, frontier and policies as JSON has them."""
    coverage = listening.coverage
    return {
        "start_ms": coverage.start_ms,
        "base_ms": coverage.base_ms,
        "gaps": coverage.gaps,
        "deaf": coverage.deaf,
        "until_ms": coverage.until_ms,
        "newest_ms": listening.newest_ms,
        "frontier_ms": listening.frontier_ms,
        "policies": [_dated_to_plain(dated) for dated in policies.dated],
    }


def world_from_plain(known: Mapping[str, Any]) -> tuple[Listening, Policies]:
    """The inverse of `world_to_plain`; further entries are passed over."""
    gaps = tuple((gap[0], gap[1]) for gap in known["gaps"])
    alone = [BRIDGE] if gaps and gaps[-1][1] is None else []
    # what was stored before there were several bridges does not say whose gap it was
    deaf, until_ms = tuple(known.get("deaf", alone)), known.get("until_ms")
    coverage = Coverage(known["start_ms"], known["base_ms"], gaps, deaf, until_ms)
    listening = Listening(coverage, known["newest_ms"], known["frontier_ms"])
    return listening, Policies(tuple(_dated_from_plain(plain) for plain in known["policies"]))


def _dated_to_plain(dated: Dated) -> dict[str, Any]:
    return {
        "effective_from_ms": dated.effective_from_ms,
        "received_at_ms": dated.received_at_ms,
        "version": dated.version,
        "policy": dated.policy.normalised(),
    }


def _dated_from_plain(plain: dict[str, Any]) -> Dated:
    return replace(Dated(**plain), policy=from_normalised(plain["policy"]))
