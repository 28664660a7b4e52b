"""``fleet chaos``: a real fleet under load, its processes killed at random, and every message accounted for."""
