"""The report of a run: curves with health alarms, where the seconds went, and the responses themselves.

`read_run` reads a run's folder, `charts` turns its metrics into figures, `read_step` its responses into what the page
shows, and `page` makes one HTML file of it all; `server` serves the same page while the run goes on.
"""
