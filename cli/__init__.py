"""The command ``fleet``: it reads arguments, calls, and shows; it decides nothing about devices."""
