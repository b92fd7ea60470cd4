"""The report of a run: curves with health alarms, where the seconds went, and the responses themselves."""
