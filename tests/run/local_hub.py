"""A local Hugging Face Hub: repositories, the cache that a download would leave, and a server for them."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

Content = Mapping[str, bytes]


def commit_of(files: Content) -> str:
    return hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()


def read_files(folder: Path) -> dict[str, bytes]:
    """The files of a folder by name, as a repository has them."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class HubCache:
    """A cache as huggingface_hub lays it out: {models,datasets}--org--name/{blobs,refs,snapshots}."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, repo: str, files: Content, *, kind: str = "model", revision: str = "main") -> str:
        """Put a commit in the cache and let a revision point to it, as after a download."""
        repo_folder = self.folder / f"{kind}s--{repo.replace('/', '--')}"
        commit = commit_of(files)
        for name, content in files.items():
            blob = repo_folder / "blobs" / hashlib.sha1(content).hexdigest()
            link = repo_folder / "snapshots" / commit / name
            blob.parent.mkdir(parents=True, exist_ok=True)
            link.parent.mkdir(parents=True, exist_ok=True)
            blob.write_bytes(content)
            if not link.is_symlink():
                link.symlink_to(blob)
        (repo_folder / "refs").mkdir(exist_ok=True)
        (repo_folder / "refs" / revision).write_text(commit)
        return commit


class HubServer:
    """Serves the requests of snapshot_download. `repos` maps (kind, id) to files; `downloads` lists the files sent."""

    def __init__(self) -> None:
        self.repos: dict[tuple[str, str], Content] = {}
        self.gated: set[str] = set()
        self.downloads: list[str] = []
        self.may_send = threading.Event()  # downloads wait for it
        self.may_send.set()
        self.url = ""

    @contextmanager
    def running(self) -> Iterator[None]:
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                owner.answer(self)

            def do_HEAD(self) -> None:
                owner.answer(self)

            def log_message(self, format: str, *args: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        self.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = request.path.partition("?")[0]
        api = re.fullmatch(r"/api/(model|dataset)s/([^/]+/[^/]+)/(revision|tree)/(.+)", path)
        file = re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/(\w+)/(.+)", path)
        match = api or file
        kind = api[1] if api else ("dataset" if file and file[1] else "model")
        repo = match[2] if match else ""
        files = self.repos.get((kind, repo))
        if files is None:
            self.send(request, 404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif file and repo in self.gated:
            self.send(request, 403, b"{}", {"X-Error-Code": "GatedRepo"})
        elif api and api[4] not in ("main", commit_of(files)):
            self.send(request, 404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif api and api[3] == "revision":
            self.send(request, 200, json.dumps({"id": repo, "sha": commit_of(files), "siblings": []}).encode())
        elif api:
            entries = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in files.items()
            ]
            self.send(request, 200, json.dumps(entries).encode())
        else:
            assert file is not None
            content = files[file[4]]
            if request.command == "GET":
                self.may_send.wait(60)
                self.downloads.append(file[4])
            headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": commit_of(files)}
            self.send(request, 200, content, headers)

    def send(
        self, request: BaseHTTPRequestHandler, code: int, body: bytes, headers: Mapping[str, str] | None = None
    ) -> None:
        request.send_response(code)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            request.send_header(name, value)
        request.end_headers()
        if request.command == "GET":
            request.wfile.write(body)
