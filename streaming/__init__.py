"""The long-running jobs, each a thin shell: simulator, bridge, landing, lifecycle."""
