"""Returns once a Ray cluster has so many nodes: python wait_for_nodes.py HOST:PORT NODES SECONDS.

When the seconds are over, the system ends it (SIGALRM).
"""

import signal
import sys
import time

signal.setitimer(signal.ITIMER_REAL, float(sys.argv[3]))

import ray  # noqa: E402 - importing it takes some of the seconds

address, wanted = sys.argv[1], int(sys.argv[2])
while True:
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        break
    except ConnectionError:  # the head is still starting
        time.sleep(1)
while sum(node["Alive"] for node in ray.nodes()) < wanted:
    time.sleep(1)
