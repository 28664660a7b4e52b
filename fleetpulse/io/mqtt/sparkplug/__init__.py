"""Sparkplug B on the wire; what it means is said by `core.sparkplug`."""
