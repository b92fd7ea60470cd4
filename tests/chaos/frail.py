"""An agent of one turn some of whose episodes fail the first time, always the same ones."""

from grpo_dist.agents import AgentLoop, Episode


class Frail(AgentLoop):
    """A third of the episodes fail after their first turn, once, and are sampled again with their next seed."""

    async def run(self, episode: Episode) -> None:
        await episode.generate()
        if not episode.attempt and (sum(episode.row.prompt_ids) + episode.index) % 3 == 0:
            raise OSError("its sandbox is gone")
