"""The addresses of the page and of its API."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from rollgraph.view import answers
from rollgraph.view.answers import Answer, NotThere, Parameters, WrongRequest
from rollgraph.view.catalog import Catalog, UnknownRun
from rollgraph.view.events import stream_events
from rollgraph.view.export import STATIC
from rollgraph.view.run_data import RunData
from rollgraph.view.safety import Access, RequestGuard

OF_RUN: dict[str, Callable[[RunData, Parameters], Answer]] = {
    "names": answers.answer_names,
    "series": answers.answer_series,
    "phases": answers.answer_phases,
    "samples": answers.answer_samples,
    "prompts": answers.answer_prompts,
    "diagnosis": answers.answer_diagnosis,
    "machine": answers.answer_machine,
}


class PlainJson(JSONResponse):
    """Texts as they are: halves of surrogate pairs, which UTF-8 does not have, are escaped."""

    def render(self, content: Any) -> bytes:
        return answers.to_json(content).encode("utf-8", "backslashreplace")


def make_app(catalog: Catalog, access: Access, is_ending: Callable[[], bool] = lambda: False) -> Starlette:
    """The application. Streams end when the server `is_ending`."""

    def runs(request: Request) -> Response:
        return PlainJson(answers.list_runs(catalog))

    def of_run(request: Request) -> Response:
        answer = OF_RUN.get(request.path_params["what"])
        if answer is None:
            raise NotThere(f"there is no {request.path_params['what']!r} of a run")
        with catalog.get(request.path_params["run"]).opened() as run:
            return PlainJson(answer(run, request.query_params))

    def sample(request: Request) -> Response:
        with catalog.get(request.path_params["run"]).opened() as run:
            return PlainJson(answers.answer_sample(run, request.path_params["id"]))

    def prompt(request: Request) -> Response:
        with catalog.get(request.path_params["run"]).opened() as run:
            return PlainJson(answers.answer_prompt(run, request.path_params["key"], request.query_params))

    def compare(request: Request) -> Response:
        return PlainJson(answers.answer_compare(catalog, request.query_params))

    async def events(request: Request) -> Response:
        return StreamingResponse(stream_events(catalog, is_ending), media_type="text/event-stream")

    def page(request: Request) -> Response:
        return FileResponse(STATIC / "index.html")

    return Starlette(
        routes=[
            Route("/", page),
            Route("/api/runs", runs),
            Route("/api/runs/{run}/samples/{id}", sample),
            Route("/api/runs/{run}/prompts/{key}", prompt),
            Route("/api/runs/{run}/{what}", of_run),
            Route("/api/compare", compare),
            Route("/api/events", events),
            Mount("/static", StaticFiles(directory=STATIC, check_dir=False)),
        ],
        middleware=[Middleware(RequestGuard, access=access)],
        exception_handlers={
            WrongRequest: refuse_with(400),
            NotThere: refuse_with(404),
            UnknownRun: refuse_with(404),
            OSError: refuse_with(503, "a file of the run went away while it was read"),
            404: refuse_with(404, "there is nothing at this address"),
            Exception: refuse_with(500, "the server failed; its terminal says how"),
        },
    )


def refuse_with(status: int, text: str = "") -> Callable[[Request, Exception], Response]:
    def refuse(request: Request, error: Exception) -> Response:
        return PlainJson({"error": text or str(error), "notes": []}, status)

    return refuse
