"""What the DAGs are made of: operators that run the command's verbs, sensors, triggers, assets, alerts."""
