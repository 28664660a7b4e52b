"""The verbs of ``fleet``, a module for each verb or group of verbs; ``cli.app`` lists them.

A verb reads arguments, calls a job or a report, and prints. It imports ``cli.common``,
``cli.supervisor``, the jobs and the library.
"""
