"""A stand-in for the part of the Hugging Face hub's HTTP interface that uploads and downloads of datasets use.

Repositories are dictionaries of commits. Large files go through Git LFS's batch interface, as on the hub without Xet.
"""

import base64
import hashlib
import json
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import unquote

LFS = re.compile(r".*\.(arrow|parquet|bin)$")


def git_oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Hub:
    """The server and what it holds."""

    def __init__(self) -> None:
        self.commits: dict[str, list[tuple[str, dict[str, bytes]]]] = {}
        "By repository: (id, files) of each commit, the last is main."
        self.objects: dict[str, bytes] = {}
        "Large files by their sha256."
        self.requests: list[str] = []
        self.refuse: str | None = None
        "Requests that contain this are answered with 500."
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Handler,), {"hub": self}))
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"
        Thread(target=self.server.serve_forever, daemon=True).start()

    def files(self, repo: str, revision: str = "main") -> dict[str, bytes]:
        commits = self.commits[repo]
        return dict(commits)[revision] if revision != "main" else commits[-1][1]

    def commit(self, repo: str, files: dict[str, bytes]) -> str:
        digest = hashlib.sha1(repr((repo, len(self.commits[repo]), sorted(files))).encode()).hexdigest()
        self.commits[repo].append((digest, files))
        return digest

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


class Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, content: Any, status: int = 200, **headers: str) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def route(self) -> None:
        path = unquote(self.path.partition("?")[0])
        length = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(length) if length else self.chunked()
        self.hub.requests.append(f"{self.command} {path}")
        if self.hub.refuse is not None and self.hub.refuse in self.hub.requests[-1]:
            self.answer({"error": "out of order"}, 500)
            return
        for pattern, method in ROUTES:
            match = re.fullmatch(pattern, f"{self.command} {path}")
            if match:
                method(self, body, **match.groupdict())
                return
        self.answer({"error": f"the stand-in does not know {self.command} {path}"}, 404)

    do_GET = do_POST = do_PUT = do_HEAD = route  # noqa: N815

    def chunked(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return b""
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def create(self, body: bytes) -> None:
        wanted = json.loads(body)
        repo = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
        known = repo in self.hub.commits
        self.hub.commits.setdefault(repo, [(hashlib.sha1(repo.encode()).hexdigest(), {".gitattributes": b"*.arrow"})])
        self.answer({"url": f"{self.hub.endpoint}/datasets/{repo}", "id": repo}, 409 if known else 200)

    def info(self, body: bytes, repo: str, revision: str = "main") -> None:
        if repo not in self.hub.commits or (revision != "main" and revision not in dict(self.hub.commits[repo])):
            code = "RepoNotFound" if repo not in self.hub.commits else "RevisionNotFound"
            self.answer({"error": "not found"}, 404, X_Error_Code=code)
            return
        sha = self.hub.commits[repo][-1][0] if revision == "main" else revision
        siblings = [{"rfilename": name} for name in self.hub.files(repo, revision)]
        self.answer(
            {"id": repo, "sha": sha, "siblings": siblings, "private": False, "downloads": 0, "likes": 0, "tags": []}
        )

    def tree(self, body: bytes, repo: str, revision: str) -> None:
        self.answer(
            [
                {"type": "file", "path": name, "size": len(content), "oid": git_oid(content), **self.lfs(name, content)}
                for name, content in self.hub.files(repo, revision).items()
            ]
        )

    def lfs(self, name: str, content: bytes) -> dict[str, Any]:
        oid = hashlib.sha256(content).hexdigest()
        return {"lfs": {"oid": oid, "size": len(content), "pointerSize": 130}} if LFS.match(name) else {}

    def preupload(self, body: bytes, repo: str, revision: str) -> None:
        there = self.hub.files(repo)
        files = []
        for file in json.loads(body)["files"]:
            name = file["path"]
            mode = "lfs" if LFS.match(name) else "regular"
            oid = {"oid": git_oid(there[name])} if name in there and mode == "regular" else {}
            files.append({"path": name, "uploadMode": mode, "shouldIgnore": False, **oid})
        self.answer({"files": files})

    def batch(self, body: bytes, repo: str) -> None:
        objects = []
        for each in json.loads(body)["objects"]:
            href = f"{self.hub.endpoint}/objects/{each['oid']}"
            actions = {} if each["oid"] in self.hub.objects else {"actions": {"upload": {"href": href, "header": {}}}}
            objects.append(each | actions)
        self.answer({"transfer": "basic", "objects": objects}, Content_Type="application/vnd.git-lfs+json")

    def put(self, body: bytes, oid: str) -> None:
        assert hashlib.sha256(body).hexdigest() == oid
        self.hub.objects[oid] = body
        self.answer({})

    def commit(self, body: bytes, repo: str, revision: str) -> None:
        files = dict(self.hub.files(repo))
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        oid = self.hub.commit(repo, files)
        url = f"{self.hub.endpoint}/datasets/{repo}/commit/{oid}"
        self.answer({"success": True, "commitOid": oid, "commitUrl": url, "hookOutput": ""})

    def resolve(self, body: bytes, repo: str, revision: str, name: str) -> None:
        files = self.hub.files(repo, revision)
        if name not in files:
            self.answer({"error": "not found"}, 404, X_Error_Code="EntryNotFound")
            return
        content = files[name]
        sha = self.hub.commits[repo][-1][0] if revision == "main" else revision
        etag = hashlib.sha256(content).hexdigest() if LFS.match(name) else git_oid(content)
        self.answer(content, ETag=f'"{etag}"', X_Repo_Commit=sha, Content_Type="application/octet-stream")


REPO = r"(?P<repo>[^/]+/[^/.]+)"
ROUTES: list[tuple[str, Any]] = [
    (r"POST /api/repos/create", Handler.create),
    (r"POST /api/validate-yaml", lambda handler, body: handler.answer({"errors": [], "warnings": []})),
    (rf"GET /api/datasets/{REPO}", Handler.info),
    (rf"GET /api/datasets/{REPO}/revision/(?P<revision>[^/]+)", Handler.info),
    (rf"GET /api/datasets/{REPO}/tree/(?P<revision>[^/]+)", Handler.tree),
    (rf"POST /api/datasets/{REPO}/preupload/(?P<revision>[^/]+)", Handler.preupload),
    (rf"POST /datasets/{REPO}\.git/info/lfs/objects/batch", Handler.batch),
    (r"PUT /objects/(?P<oid>[0-9a-f]{64})", Handler.put),
    (rf"POST /api/datasets/{REPO}/commit/(?P<revision>[^/]+)", Handler.commit),
    (rf"(GET|HEAD) /datasets/{REPO}/resolve/(?P<revision>[^/]+)/(?P<name>.+)", Handler.resolve),
]
