"""An agent on another machine, emulated, which plays an episode at the endpoint of a rollout worker on this one."""

import json
import os
import sys
from typing import Any

import pytest

from grpo_dist.engines.rendezvous import LOOPBACK
from tests.cluster.machines import machines
from tests.cluster.ray_nodes import ended

pytestmark = pytest.mark.deep
# The server that plays, with nothing but Python. A status of 0: nobody listens there.
AGENT = """
import http.server, json, urllib.error, urllib.request

def status(address, body=None, **headers):
    try:
        with urllib.request.urlopen(urllib.request.Request(address, body, headers), timeout=30) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0

class Player(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        root, token = asked["base_url"].removesuffix("/v1"), asked["token"]
        metrics = {"own": status(f"{root}/v1/completions", b"hi", authorization=f"Bearer {token}")}
        metrics |= {"path": status(f"{root}/s/{token}/v1/completions", b"ok")}
        metrics |= {"none": status(f"{root}/v1/completions"), "guess": status(f"{root}/s/guess/v1/models")}
        body = json.dumps({"ok": True, "reward": 1.0, "metrics": metrics}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

server = http.server.HTTPServer(("", 9000), Player)
print("listening", flush=True)
server.serve_forever()
"""
# A worker's gateway and runner, over a policy that says what it reads in capitals.
WORKER = """
import asyncio, json, sys
from grpo_dist.agents import Episode, Row
from grpo_dist.agents.runner import EpisodeRunner
from grpo_dist.engines.settings import SamplingSettings
from grpo_dist.errors import AgentError
from tests.agents.fakes import Characters
from tests.agents.gateways import serving, upper
from tests.worker_settings import agent

async def main(host, node_ip, url):
    async def generate(prompt, sampling, uid):
        return [await upper(prompt, sampling)]
    async with serving(host=host, node_ip=node_ip, advertised_host=node_ip) as gateway:
        runner = EpisodeRunner(agent("external", {"url": url}, max_attempts=1), generate, gateway)
        await runner.start()
        sampling = SamplingSettings(1, 1.0, 1.0, -1, 50, 7)
        episode = Episode(Row("u", [1], ()), sampling, tokenizer=Characters(), max_model_len=90, max_episode_len=400)
        try:
            await runner.run([episode])
        except AgentError as error:
            print(error, file=sys.stderr)
        tokens = "".join(map(chr, [*episode.prompt_ids, *episode.token_ids]))
        print(json.dumps([gateway.url, tokens, episode.reward, episode.metrics]))
        await runner.stop()

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("host", ["auto", LOOPBACK])
def test_an_agent_on_another_machine_plays_where_the_endpoint_is_open_to_it(host: str) -> None:
    with machines(2) as there:
        here, away = there.addresses
        agent = there.start(1, sys.executable, "-c", AGENT, env=os.environ)
        assert agent.stdout is not None
        assert agent.stdout.readline() == "listening\n", agent.communicate()
        url = f"http://{away}:9000"
        code, said = ended(there.start(0, sys.executable, "-c", WORKER, host, here, url, env=os.environ))
    assert code == 0, said
    url, tokens, reward, metrics = json.loads(said.splitlines()[-1])
    found: dict[str, Any] = {name: value for name, value in metrics.items() if name != "delivered_tokens"}
    assert url.startswith(f"http://{here}:")
    names = ("own", "path", "none", "guess")
    if host == LOOPBACK:
        assert (found, tokens) == (dict.fromkeys(names, 0), "\1"), said
    else:
        assert found == dict(zip(names, (200, 200, 401, 401), strict=True)), said
        assert (tokens, reward) == ("hiHIokOK", 1.0), "each call begins anew"
