"""Reports over the streams beside the lifecycle: sessions, vitals, commands."""
