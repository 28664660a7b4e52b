"""Commands that run batch jobs: amend, backtest, drill, maintain and quality.

They read options, call the jobs in ``batch``, and print the results.
``cli.app`` imports each module when its command is called; no other package imports them.
Begin with the module that has the name of the command.
"""
