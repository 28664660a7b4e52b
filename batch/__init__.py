"""Jobs that end: snapshot, bootstrap, migrate and the like."""
