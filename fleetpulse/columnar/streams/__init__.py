"""Folds of the streams beside the lifecycle over the blocks of a key group.

Each equals a definition in `core.streams`. Begin reading at `sessions.py`.
"""
