"""Clients of others, where they are installed, as docs/clients.md has them."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.serve.conftest import Running
from tokenswift import LLM

pytestmark = pytest.mark.filterwarnings("ignore")
NEW = 12
CHAT = [{"role": "user", "content": "Hello!"}]


class City(BaseModel):
    """A town."""

    name: Literal["Brest", "Paris"]


def at(server: Running) -> dict[str, Any]:
    """Where the server is, as most clients are told."""
    return {"base_url": f"{server.url}/v1", "api_key": "none"}


def test_langchain(server: Running, llm: LLM) -> None:
    langchain: Any = pytest.importorskip("langchain_openai")
    chat = langchain.ChatOpenAI(**at(server), model="m", max_tokens=NEW, seed=5)
    wanted = llm.generate(CHAT, NEW, "autoregressive", seed=5)
    assert chat.invoke("Hello!").content == wanted.text
    assert "".join(chunk.content for chunk in chat.stream("Hello!")) == wanted.text
    scored = chat.bind(logprobs=True, top_logprobs=2).invoke("Hello!")
    content = scored.response_metadata["logprobs"]["content"]
    assert len(content) == len(wanted.token_ids)
    texts = langchain.OpenAI(**at(server), model="m", max_tokens=NEW, seed=5)
    generations = texts.generate(["hello", "so long"]).generations
    alone = [llm.generate(one, NEW, "autoregressive", seed=5).text for one in ("hello", "so long")]
    assert [several[0].text for several in generations] == alone


def test_langchains_structured_output(server: Running) -> None:
    langchain: Any = pytest.importorskip("langchain_openai")
    chat = langchain.ChatOpenAI(**at(server), model="m", max_tokens=200, temperature=0)
    assert isinstance(chat.with_structured_output(City).invoke("Hello!"), City)


def test_instructor(server: Running) -> None:
    instructor: Any = pytest.importorskip("instructor")
    client = instructor.from_openai(server.client(), mode=instructor.Mode.JSON_SCHEMA)
    answer = client.chat.completions.create(
        model="m", messages=CHAT, response_model=City, max_tokens=200
    )
    assert isinstance(answer, City)


def test_pydantic_ai(server: Running) -> None:
    pytest.importorskip("pydantic_ai")
    from pydantic_ai import Agent, NativeOutput  # type: ignore[import-not-found]
    from pydantic_ai.models.openai import OpenAIChatModel  # type: ignore[import-not-found]
    from pydantic_ai.providers.openai import OpenAIProvider  # type: ignore[import-not-found]

    async def output() -> object:
        async with openai.AsyncOpenAI(**at(server)) as client:
            model = OpenAIChatModel("m", provider=OpenAIProvider(openai_client=client))
            answer = await Agent(model, output_type=NativeOutput(City)).run("Hello!")
            return answer.output

    assert isinstance(asyncio.run(output()), City)


@pytest.mark.parametrize("kind", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
def test_openai_agents(tools: Running, kind: str) -> None:
    """An agent calls its tool, reads the result and answers, streamed or not."""
    agents: Any = pytest.importorskip("agents")
    cities: list[str] = []

    def tool(city: Literal["Brest", "Paris"]) -> str:
        """The weather of a town."""
        cities.append(city)
        return "rain"

    async def outputs() -> list[object]:
        async with openai.AsyncOpenAI(**at(tools)) as client:
            agent = agents.Agent(
                name="Clerk",
                instructions="Be short.",
                model=getattr(agents, kind)(model="m", openai_client=client),
                model_settings=agents.ModelSettings(temperature=0, max_tokens=200),
                tools=[agents.function_tool(tool)],
            )
            answer = await agents.Runner.run(agent, "What is the weather?")
            streamed = agents.Runner.run_streamed(agent, "What is the weather?")
            async for _ in streamed.stream_events():
                pass
            return [answer.final_output, streamed.final_output]

    agents.set_tracing_disabled(True)
    assert asyncio.run(outputs()) == ["ok", "ok"]
    assert len(cities) == 2


def test_the_evaluation_harness(server: Running, llm: LLM) -> None:
    """Its requests for the probability of a text behind another, parsed by itself."""
    models: Any = pytest.importorskip("lm_eval.models.openai_completions")
    url = f"{server.url}/v1/completions"
    api = models.LocalCompletionsAPI(model="m", base_url=url, tokenizer_backend=None)
    ids = [llm.encode("hello, world"), llm.encode("so long")]
    body = api._create_payload(ids, generate=False)
    replies = server.post("/v1/completions", body).json()
    scored = api.parse_logprobs(replies, tokens=ids, ctxlens=[3, 3])
    for prompt, (total, is_greedy) in zip(ids, scored, strict=True):
        records = llm.generate(prompt, 1, prompt_logprobs=1).prompt_logprobs[3:]
        values = [record.logprob for record in records if record is not None]
        assert total == pytest.approx(sum(values))
        assert is_greedy == all(record is not None and record.rank == 1 for record in records)
