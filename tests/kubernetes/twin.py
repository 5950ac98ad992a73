"""A twin of the Kubernetes API server: objects in memory, with its rules for what is asked here.

Requests are held against the recorded OpenAPI document beside this file (paths, verbs, parameters
and content types) and bodies against the schemas of the newest Kubernetes that the tests know.
What it is to answer was seen at a real one: tests/integration/test_kubernetes.py runs with either.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
from aiohttp import web

OPENAPI = Path(__file__).with_name("openapi-v1.20.2.json")
OBJECTS = "1.37"
"""Version of the schemas for bodies."""

Object = dict[str, Any]
Key = tuple[str, str, str]
"""Resource, namespace, name."""

_PATH = re.compile(
    r"/(?:api/v1|apis/(?P<group>[^/]+)/v1)/namespaces/(?P<namespace>[^/]+)/(?P<resource>[a-z]+)"
    r"(?:/(?P<name>[^/]+)(?:/(?P<sub>[a-z]+))?)?"
)
_VERBS = {"GET": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
_MERGE_PATCH = "application/merge-patch+json"
_REASONS = {
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    409: "Conflict",
    415: "UnsupportedMediaType",
    422: "Invalid",
}


class RefusedError(Exception):
    """An answer that is an error."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


@dataclass(frozen=True)
class Call:
    """A request to the API."""

    verb: str
    group: str
    namespace: str
    resource: str
    name: str
    sub: str
    query: Mapping[str, str]
    body: Object
    content_type: str

    @property
    def key(self) -> Key:
        return self.resource, self.namespace, self.name

    @property
    def rights_to(self) -> str:
        return f"{self.resource}/{self.sub}" if self.sub else self.resource


class KubernetesTwin:
    """An API server.

    Args:
        users: user names by token; `system:admin` may do everything, others what roles say.
    """

    def __init__(self, users: Mapping[str, str]) -> None:
        self._users = users
        self._objects: dict[Key, Object] = {}
        self._versions = itertools.count(1)
        self.calls: list[str] = []
        """Who called what: user, verb, resource."""

    # --- HTTP ----------------------------------------------------------------------------------

    async def answer(self, request: web.Request) -> web.Response:
        """Answers any request."""
        try:
            call = await _call(request)
            self._check_rights(request.headers.get("Authorization", ""), call)
            check_request(request.method, request.path, call)
            code = 201 if call.verb == "create" else 200
            return web.json_response(self._do(call), status=code)
        except RefusedError as refused:
            status = {
                "kind": "Status",
                "apiVersion": "v1",
                "status": "Failure",
                "message": refused.message,
                "reason": _REASONS[refused.code],
                "code": refused.code,
            }
            return web.json_response(status, status=refused.code)

    def _check_rights(self, authorization: str, call: Call) -> None:
        user = self._users.get(authorization.removeprefix("Bearer ").removeprefix("bearer "))
        if user is None:
            raise RefusedError(401, "Unauthorized")
        self.calls.append(f"{user} {call.verb} {call.rights_to}")
        if user == "system:admin" or any(_allows(rule, call) for rule in self._rules(user, call)):
            return
        raise RefusedError(
            403,
            f'{call.resource} "{call.name}" is forbidden: User "{user}" cannot {call.verb} resource'
            f' "{call.rights_to}" in API group "{call.group}" in the namespace "{call.namespace}"',
        )

    def _rules(self, user: str, call: Call) -> Iterator[Object]:
        for (resource, namespace, _), binding in self._objects.items():
            if resource != "rolebindings" or namespace != call.namespace:
                continue
            names = {
                f"system:serviceaccount:{each['namespace']}:{each['name']}"
                for each in binding["subjects"]
                if each["kind"] == "ServiceAccount"
            }
            if user in names:
                role = self._objects["roles", namespace, binding["roleRef"]["name"]]
                yield from role["rules"]

    # --- objects -------------------------------------------------------------------------------

    def _do(self, call: Call) -> Object:
        if call.verb == "create":
            return self._create(call)
        if call.verb == "list":
            return self._list(call)
        found = self._objects.get(call.key)
        if found is None:
            where = f"{call.resource}.{call.group}" if call.group else call.resource
            raise RefusedError(404, f'{where} "{call.name}" not found')
        if call.verb == "delete":
            return self._delete(call, found)
        if call.verb == "patch":
            return self._patch(call, found)
        if call.verb == "update":
            return self._resize(call, found)
        return scale_of(found) if call.sub == "scale" else found

    def _create(self, call: Call) -> Object:
        made: Object = json.loads(json.dumps(call.body))
        metadata = made["metadata"]
        key = (call.resource, call.namespace, metadata["name"])
        if key in self._objects:
            raise RefusedError(409, f'{call.resource} "{metadata["name"]}" already exists')
        metadata.update(namespace=call.namespace, uid=str(next(self._versions)))
        if made["kind"] == "Pod":
            made["status"] = {"phase": "Pending"}
        if made["kind"] == "Deployment":
            made["spec"].setdefault("replicas", 1)
        return self._changed(key, made)

    def _list(self, call: Call) -> Object:
        items = [
            found
            for (resource, namespace, _), found in self._objects.items()
            if (resource, namespace) == (call.resource, call.namespace)
            and selects(call.query.get("labelSelector", ""), found["metadata"].get("labels", {}))
        ]
        return {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": items}

    def _delete(self, call: Call, found: Object) -> Object:
        grace = call.query.get("gracePeriodSeconds", call.body.get("gracePeriodSeconds", 30))
        if not found["spec"].get("nodeName") or int(grace) == 0:
            return self._objects.pop(call.key)
        metadata = {"deletionTimestamp": "2026-01-01T00:00:00Z"}
        metadata["deletionGracePeriodSeconds"] = int(grace)  # type: ignore[assignment]
        return self._changed(call.key, merged_patch(found, {"metadata": metadata}))

    def _patch(self, call: Call, found: Object) -> Object:
        if call.content_type != _MERGE_PATCH:
            raise RefusedError(415, f"this twin knows no {call.content_type}")
        part = {"status": call.body["status"]} if call.sub == "status" else call.body
        _check_version(call, found)
        changed = merged_patch(found, part)
        check_object(changed)
        cost = (
            changed["metadata"]
            .get("annotations", {})
            .get("controller.kubernetes.io/pod-deletion-cost", "0")
        )
        if not re.fullmatch(r"0|-?[1-9]\d*", cost) or not -(2**31) <= int(cost) < 2**31:
            raise RefusedError(422, f"Pod {call.name!r} is invalid: {cost!r} is no 32bit integer")
        return self._changed(call.key, changed)

    def _resize(self, call: Call, found: Object) -> Object:
        if not call.body["metadata"].get("namespace"):
            raise RefusedError(422, "metadata.namespace: Required value")
        _check_version(call, found)
        replicas = call.body["spec"].get("replicas", 0)
        if replicas < 0:
            raise RefusedError(422, "spec.replicas: must be greater than or equal to 0")
        changed = merged_patch(found, {"spec": {"replicas": replicas}})
        return scale_of(self._changed(call.key, changed))

    def _changed(self, key: Key, made: Object) -> Object:
        made["metadata"]["resourceVersion"] = str(next(self._versions))
        self._objects[key] = made
        return made


async def _call(request: web.Request) -> Call:
    match = _PATH.fullmatch(request.path)
    if match is None:
        raise RefusedError(404, "the server could not find the requested resource")
    text = await request.text()
    name = match["name"] or ""
    verb = "list" if request.method == "GET" and not name else _VERBS[request.method]
    return Call(
        verb,
        match["group"] or "",
        match["namespace"],
        match["resource"],
        name,
        match["sub"] or "",
        request.query,
        json.loads(text) if text else {},
        request.content_type,
    )


def _allows(rule: Object, call: Call) -> bool:
    names = rule.get("resourceNames")
    return (
        call.group in rule["apiGroups"]
        and call.rights_to in rule["resources"]
        and call.verb in rule["verbs"]
        and (names is None or call.name in names)
    )


def _check_version(call: Call, found: Object) -> None:
    version = call.body.get("metadata", {}).get("resourceVersion")
    if version not in (None, found["metadata"]["resourceVersion"]):
        raise RefusedError(
            409,
            f'Operation cannot be fulfilled on {call.resource} "{call.name}": the object has been'
            " modified; please apply your changes to the latest version and try again",
        )


def scale_of(deployment: Object) -> Object:
    """The subresource `scale` of a Deployment."""
    metadata = deployment["metadata"]
    labels = deployment["spec"]["selector"]["matchLabels"]
    names = ("name", "namespace", "uid", "resourceVersion")
    return {
        "kind": "Scale",
        "apiVersion": "autoscaling/v1",
        "metadata": {name: metadata[name] for name in names},
        "spec": {"replicas": deployment["spec"]["replicas"]},
        "status": {"replicas": 0, "selector": ",".join(f"{a}={b}" for a, b in labels.items())},
    }


def selects(selector: str, labels: Mapping[str, str]) -> bool:
    """Whether a selector of the forms `a` and `a=b`, joined by commas, selects labels."""
    for part in filter(None, selector.split(",")):
        name, equals, value = part.partition("=")
        if name not in labels or (equals and labels[name] != value):
            return False
    return True


def merged_patch(target: Any, patch: Any) -> Any:
    """A JSON merge patch (RFC 7396)."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merged_patch(result.get(name), value)
    return result


# --- the recorded document ------------------------------------------------------------------------


@cache
def recorded() -> list[tuple[re.Pattern[str], Object]]:
    """The operations of the recorded document, by path."""
    paths = json.loads(OPENAPI.read_text())["paths"]
    return [
        (re.compile(re.sub(r"\{\w+\}", "[^/]+", path)), operations)
        for path, operations in paths.items()
    ]


def check_request(method: str, path: str, call: Call) -> None:
    """Fails the test if a request is none of the recorded document's."""
    found = [each for pattern, each in recorded() if pattern.fullmatch(path)]
    assert found, f"no such path is recorded: {path}"
    operation = found[0].get(method.lower())
    assert operation, f"{method} is not recorded for {path}"
    known = {each["name"] for each in operation["parameters"] if each["in"] == "query"}
    assert call.query.keys() <= known, f"{path}: unknown parameters {call.query.keys() - known}"
    if operation["consumes"] != ["*/*"]:
        assert call.content_type in operation["consumes"], f"{path} takes no {call.content_type}"
    if any(each["in"] == "body" and each.get("required") for each in operation["parameters"]):
        assert call.body, f"{method} {path} needs a body"
    if method in ("POST", "PUT"):
        check_object(call.body)


def check_object(found: Object) -> None:
    """Fails the test if an object does not follow its schema."""
    same = {name: "x" for name in ("name", "uid", "resourceVersion") if name in found["metadata"]}
    _check_text(json.dumps({**found, "metadata": {**found["metadata"], **same}}))


@cache  # a check reads two megabytes of schemas
def _check_text(text: str) -> None:
    kubernetes_validate.validate(json.loads(text), OBJECTS, strict=True)


@asynccontextmanager
async def kubernetes_twin(users: Mapping[str, str]) -> AsyncIterator[tuple[KubernetesTwin, str]]:
    """A running twin and its URL."""
    twin = KubernetesTwin(users)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", twin.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield twin, f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
