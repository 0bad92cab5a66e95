"""Every error that vescale_fsdp raises for its users."""

from __future__ import annotations

__all__ = ["PlanError", "PluginError", "VescaleError"]


class VescaleError(ValueError):
    """Base of our errors; the message says what was expected, what came, for which parameter, and what to do."""


class PlanError(VescaleError):
    """Parameters that cannot be planned, or a plan that breaks its own rules."""


class PluginError(VescaleError):
    """A plugin that is missing, broken, or registered twice."""
