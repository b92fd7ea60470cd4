"""Returns once a Ray cluster has so many nodes: python wait_for_nodes.py HOST:PORT NODES."""

import sys
import time

import ray

address, wanted = sys.argv[1], int(sys.argv[2])
while True:
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        break
    except ConnectionError:  # the head is still starting
        time.sleep(1)
while sum(node["Alive"] for node in ray.nodes()) < wanted:
    time.sleep(1)
