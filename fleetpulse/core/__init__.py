"""The domain: values in and values out; no clock, no file, no socket, no third party."""
