"""A stand-in for vLLM 0.32.0: its wire contract around the made-up tokens of the fake SGLang.

test_contract.py holds the real one to the same behaviour where SWERL_VLLM_PYTHON names it.
"""

from __future__ import annotations

from pathlib import Path

from aiohttp import web

from tests.unit.engines._fake_sglang import CONTEXT, FakeServer, Running


class FakeVllm(FakeServer):
    """One server."""

    def __init__(self, model: Path) -> None:
        super().__init__(model)
        self.release = "0.32.0"
        self.device = "cuda"
        self.logprobs_mode = "processed_logprobs"
        self.refuses_reload: set[str] = set()
        """Folders whose weights have another shape."""

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/inference/v1/generate", self._generate_tokens),
            web.post("/abort_requests", self._abort_requests),
            web.post("/pause", self._pause_mode),
            web.post("/resume", self._continue),
            web.post("/collective_rpc", self._reload),
            web.post("/reset_prefix_cache", self._flush),
            web.post("/update_weight_version", self._name_version),
            web.get("/weight_info", self._weight_info),
            web.get("/server_info", self._config),
            web.get("/version", self._version),
            web.get("/v1/models", self._models),
            web.get("/health", self._health),
        ]

    async def _generate_tokens(self, request: web.Request) -> web.Response:
        body = await request.json()
        ids, params = body["token_ids"], body["sampling_params"]
        if not ids or len(ids) > CONTEXT:
            message = f"token_ids of length {len(ids)}; the maximum model length is {CONTEXT}"
            return web.json_response({"error": {"message": message, "code": 400}}, status=400)
        assert params["logprobs"] == 0 and params["detokenize"] is False
        limit = min(params["max_tokens"], CONTEXT - len(ids))
        one = Running({
            "rid": f"generate-tokens-{body['request_id']}",
            "input_ids": ids,
            "sampling_params": {**params, "max_new_tokens": limit},
        })  # fmt: skip
        self.running[one.body["rid"]] = one
        try:
            finish = await self._sample(one)
        finally:
            del self.running[one.body["rid"]]
        meta = self._answer(one, finish)["meta_info"]
        content = [{"token_id": token, "logprob": -1.5} for token in one.ids]
        choice = {
            "index": 0,
            "finish_reason": finish["type"],
            "token_ids": one.ids,
            "logprobs": {"content": content},
            "weight_versions": meta["weight_versions"] if one.ids else None,
        }
        cached = {"cached_tokens": meta["cached_tokens"]}
        usage = {"prompt_tokens": len(ids), "prompt_tokens_details": cached}
        answer = {"request_id": one.body["rid"], "choices": [choice], "usage": usage}
        return web.json_response(self.fault(answer) if self.fault else answer)

    async def _abort_requests(self, request: web.Request) -> web.Response:
        names = (await request.json())["request_ids"]
        for name, one in self.running.items():
            one.aborted = one.aborted or name in names
        return web.json_response({"status": "aborted", "aborted": len(names)})

    async def _pause_mode(self, request: web.Request) -> web.Response:
        self.paused = True
        for one in self.running.values():
            one.aborted = one.aborted or request.query["mode"] == "abort"
        return web.json_response({"status": "paused"})

    async def _reload(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert body["method"] == "reload_weights"
        folder = body["kwargs"]["weights_path"]
        if folder in self.refuses_reload:
            return web.json_response({"error": {"message": "size mismatch"}}, status=500)
        self.model = Path(folder)
        return web.json_response({"results": [None]})

    async def _name_version(self, request: web.Request) -> web.Response:
        self.version = (await request.json())["new_version"]
        return web.json_response({"success": True, "new_version": self.version})

    async def _weight_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.version})

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": self.release})

    async def _config(self, request: web.Request) -> web.Response:
        assert request.query["config_format"] == "json"
        config = {
            "model_config": {"logprobs_mode": self.logprobs_mode},
            "device_config": {"device": self.device},
        }
        return web.json_response({"vllm_config": config})

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": str(self.model), "root": str(self.model), "max_model_len": CONTEXT}
        return web.json_response({"object": "list", "data": [model]})
