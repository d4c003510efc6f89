"""What answers as an SGLang server does: with a model of transformers, and strictly. A field that
SGLang's request classes (`sglang_requests.json`) do not have is refused, as is a missing one.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import uvicorn
from safetensors.torch import load_file
from torch.distributed.distributed_c10d import _new_process_group_helper, _world, rendezvous
from transformers import AutoConfig, AutoModelForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--host", default="127.0.0.1")
parser.add_argument("--port", type=int)
parser.add_argument("--model-path")
parser.add_argument("--api-key")
parser.add_argument("--version", default="0.5.23", help="that it says it is of")
parser.add_argument("--pause", type=float, default=0.0, help="seconds that each token takes")
parser.add_argument("--aloof", action="store_true", help="say that it joined a group, and do not")
given = parser.parse_args()

FIELDS = json.loads(Path(__file__).with_name("sglang_requests.json").read_text())
BASE = {"rid": False, "http_worker_ipc": False}  # of every class
CLASSES = {
    "/generate": "GenerateReqInput",
    "/pause_generation": "PauseGenerationReqInput",
    "/continue_generation": "ContinueGenerationReqInput",
    "/update_weights_from_disk": "UpdateWeightFromDiskReqInput",
    "/init_weights_update_group": "InitWeightsUpdateGroupReqInput",
    "/destroy_weights_update_group": "DestroyWeightsUpdateGroupReqInput",
    "/begin_weight_update": "BeginWeightUpdateReqInput",
    "/update_weights_from_distributed": "UpdateWeightsFromDistributedReqInput",
    "/end_weight_update": "EndWeightUpdateReqInput",
    "/abort_request": "AbortReq",
}
MODES = {"abort", "retract", "in_place"}
INFO = {
    "version": given.version,
    "startup_time": time.time(),
    "tp_size": 1,
    "pp_size": 1,
    "dp_size": 1,
    "enable_deterministic_inference": True,
}


class Refused(Exception):
    """Refused is answered with 400."""


class Running:
    """Running is a request that is being answered."""

    def __init__(self) -> None:
        self.aborted = False
        self.cache: Any = None  # keys and values of what was read

    def logits(self, model: Any, ids: list[int]) -> Any:
        """Returns the logits behind `ids`, [vocabulary]."""
        read = self.cache.get_seq_length() if self.cache is not None else 0
        with torch.no_grad():
            found = model(torch.tensor([ids[read:]]), past_key_values=self.cache, use_cache=True)
        self.cache = found.past_key_values
        return found.logits[0, -1]


class Server:
    """Server holds the model, and what has been said about it."""

    def __init__(self) -> None:
        config = AutoConfig.from_pretrained(given.model_path)
        torch.manual_seed(0)
        self.model = AutoModelForCausalLM.from_config(config).float().eval()
        self.version, self.mode, self.session = "default", "", False
        self.running: set[Running] = set()
        self.groups: dict[str, Any] = {}
        self.moved = asyncio.Condition()

    async def respond(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        name = CLASSES[path]
        known = FIELDS[name] | BASE
        if strange := body.keys() - known.keys():
            raise Refused(f"{name} has no {sorted(strange)}")
        if missing := {field for field, must in known.items() if must} - body.keys():
            raise Refused(f"{name} needs {sorted(missing)}")
        found: dict[str, Any] = await getattr(self, path[1:])(body)
        return found

    async def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        sampling = body["sampling_params"]
        if strange := sampling.keys() - FIELDS["SamplingParams"].keys():
            raise Refused(f"SamplingParams has no {sorted(strange)}")
        async with self.moved:
            await self.moved.wait_for(lambda: not self.mode)
        own = Running()
        self.running.add(own)
        try:
            told = await self._tokens(own, body["input_ids"], sampling, body)
        finally:
            self.running.discard(own)
            async with self.moved:
                self.moved.notify_all()
        return {
            "text": "",
            "output_ids": [token for _, token, _ in told["output_token_logprobs"]],
        } | {"meta_info": told}

    async def _tokens(
        self, own: Running, context: list[int], sampling: dict[str, Any], body: dict[str, Any]
    ) -> dict[str, Any]:
        pairs: list[tuple[float, int, None]] = []
        parts: list[float] = []
        versions: list[str] = []
        reason = {"type": "length", "length": sampling["max_new_tokens"]}
        while len(pairs) < sampling["max_new_tokens"]:
            await asyncio.sleep(given.pause)
            async with self.moved:
                await self.moved.wait_for(lambda: not self.mode or own.aborted)
            if own.aborted:
                reason = {"type": "abort", "message": "Abort in waiting queue"}
                break
            ids = [*context, *(token for _, token, _ in pairs)]
            token, whole, part = drawn(own.logits(self.model, ids), sampling, len(pairs))
            pairs.append((whole, token, None))
            parts.append(part)
            versions.append(self.version)
            if token in (sampling.get("stop_token_ids") or ()):
                reason = {"type": "stop", "matched": token}
                break
        found = {
            "finish_reason": reason,
            "weight_version": self.version,
            "weight_versions": list(spans(versions)),
        }
        if body.get("return_logprob"):
            found["output_token_logprobs"] = pairs
        if body.get("return_sampling_mask"):
            found["output_token_sampling_logprobs"] = parts
        return found

    async def pause_generation(self, body: dict[str, Any]) -> dict[str, Any]:
        mode = body.get("mode", "abort")
        if mode not in MODES:
            raise Refused(f"mode {mode} is none of {sorted(MODES)}")
        self.mode = mode
        if mode == "abort":
            await self._aborted()
        if mode == "retract":
            for each in self.running:
                each.cache = None
        return {"status": "ok"}

    async def continue_generation(self, body: dict[str, Any]) -> dict[str, Any]:
        async with self.moved:
            self.mode = ""
            self.moved.notify_all()
        return {"status": "ok"}

    async def abort_request(self, body: dict[str, Any]) -> dict[str, Any]:
        if body.get("abort_all"):
            await self._aborted()
        return {}

    async def update_weights_from_disk(self, body: dict[str, Any]) -> dict[str, Any]:
        # its own is that of random weights, with which it was started
        if body.get("load_format") in (None, "dummy"):
            raise Refused("Failed to get model loader")
        await self._quiet()
        tensors: dict[str, Any] = {}
        for file in sorted(Path(body["model_path"]).glob("*.safetensors")):
            tensors |= load_file(file)
        if not tensors:
            raise Refused(f"no weights in {body['model_path']}")
        self._load(tensors)
        return self._updated(body)

    async def init_weights_update_group(self, body: dict[str, Any]) -> dict[str, Any]:
        if body.get("backend", "nccl") != "gloo":
            raise Refused("there is no NCCL here")
        if given.aloof:
            return {"success": True}
        self.groups[body["group_name"]] = await asyncio.to_thread(joined, body)
        return {"success": True}

    async def destroy_weights_update_group(self, body: dict[str, Any]) -> dict[str, Any]:
        if body["group_name"] not in self.groups:
            raise Refused("The group to be destroyed does not exist.")
        dist.destroy_process_group(self.groups.pop(body["group_name"]))
        return {"success": True}

    async def begin_weight_update(self, body: dict[str, Any]) -> dict[str, Any]:
        if self.session:
            raise Refused("a session is open")
        await self._quiet()
        self.session = True
        return {"success": True}

    async def update_weights_from_distributed(self, body: dict[str, Any]) -> dict[str, Any]:
        if not self.session:
            raise Refused("update_weights_from_distributed must run between begin and end")
        await self._quiet()
        group = self.groups[body.get("group_name", "weight_update_group")]
        described = zip(body["names"], body["dtypes"], body["shapes"], strict=True)
        tensors = {
            name: torch.empty(shape, dtype=getattr(torch, dtype))
            for name, dtype, shape in described
        }
        await asyncio.to_thread(received, list(tensors.values()), group)
        self._load(tensors)
        return self._updated(body)

    async def end_weight_update(self, body: dict[str, Any]) -> dict[str, Any]:
        if not self.session:
            raise Refused("no session is open")
        self.session = False
        return {"success": True}

    async def _aborted(self) -> None:
        async with self.moved:
            for each in self.running:
                each.aborted = True
            self.moved.notify_all()
            await self.moved.wait_for(lambda: not self.running)

    async def _quiet(self) -> None:
        """Waits for answers under way, unless it was paused before."""
        if not self.mode:
            async with self.moved:
                await self.moved.wait_for(lambda: not self.running)

    def _load(self, tensors: dict[str, Any]) -> None:
        strange = self.model.load_state_dict(tensors, strict=False).unexpected_keys
        if strange:
            raise Refused(f"the model has no {strange[:3]}")

    def _updated(self, body: dict[str, Any]) -> dict[str, Any]:
        if body.get("flush_cache", True) and self.running and self.mode != "retract":
            raise Refused("Weights were updated, but the cache was not flushed")
        self.version = body.get("weight_version") or self.version
        return {"success": True, "message": "", "num_paused_requests": 0}


def drawn(logits: Any, sampling: dict[str, Any], place: int) -> tuple[int, float, float]:
    """Returns a token, its log-prob at the temperature, and that among the tokens that are kept."""
    temperature, top_k = sampling.get("temperature", 1.0), sampling.get("top_k", -1)
    if top_k == 0 or top_k < -1:
        raise Refused(f"top_k must be -1 (disable) or at least 1, got {top_k}.")
    if temperature == 0:
        temperature, top_k = 1.0, 1
    whole = torch.log_softmax(logits / temperature, dim=-1)
    kept = whole.clone()
    if top_k > 0:
        kept[whole < whole.topk(top_k).values[-1]] = -torch.inf
    ordered, order = whole.sort(descending=True)
    before = ordered.exp().cumsum(0) - ordered.exp()
    kept[order[before > sampling.get("top_p", 1.0)]] = -torch.inf
    kept[whole < whole.max() + torch.tensor(sampling.get("min_p", 0.0)).log()] = -torch.inf
    part = torch.log_softmax(kept, dim=-1)
    generator = torch.Generator().manual_seed(sampling.get("sampling_seed", 0) * 4096 + place)
    token = int(torch.multinomial(part.exp(), 1, generator=generator))
    return token, float(whole[token]), float(part[token])


def spans(versions: list[str]) -> Iterator[dict[str, Any]]:
    start = 0
    for version, same in itertools.groupby(versions):
        end = start + len(list(same))
        yield {"version": version, "start": start, "end": end}
        start = end


def joined(body: dict[str, Any]) -> Any:
    """Joins the group as the first worker, by the steps of SGLang's `init_custom_process_group`."""
    size, name, limit = body["world_size"], body["group_name"], timedelta(seconds=60)
    place = f"tcp://{body['master_address']}:{body['master_port']}"
    store, rank, size = next(rendezvous(place, body["rank_offset"], size, timeout=limit))
    store.set_timeout(limit)
    own: Any = dist.PrefixStore(name, store)
    kind: Any = dist.Backend(body["backend"])
    group, _ = _new_process_group_helper(size, rank, [], kind, own, group_name=name, timeout=limit)
    _world.pg_group_ranks[group] = {number: number for number in range(size)}
    return group


def received(tensors: list[Any], group: Any) -> None:
    waiting = [dist.broadcast(each, src=0, group=group, async_op=True) for each in tensors]
    for each in waiting:
        each.wait()


async def application(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        return
    text, more = b"", True
    while more:
        message = await receive()
        text, more = text + message["body"], message.get("more_body", False)
    key = (b"authorization", f"Bearer {given.api_key}".encode())
    status, told = 200, dict[str, Any]()
    if key not in scope["headers"]:
        status = 401
    elif scope["path"] == "/server_info":
        told = INFO
    elif scope["path"] == "/model_info":
        told = {"weight_version": server.version}
    elif scope["path"] in CLASSES:
        try:
            told = await server.respond(scope["path"], json.loads(text))
        except Refused as error:
            status, told = 400, {"success": False, "message": str(error)}
    elif scope["path"] != "/health":
        status = 404
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": json.dumps(told).encode()})


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    server = Server()
    listening = uvicorn.Server(
        uvicorn.Config(application, host=given.host, port=given.port, log_level="error")
    )
    listening.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
    listening.run()
