"""Kernels from the Hub, by the real loader of `kernels`, each in a Python of its own: it reads its settings once."""

import json

from .fakes import HUB_INIT
from .fakes import HUB_LAYERS
from .fakes import lay_out_hub_cache
from .fakes import run_offline

PREPARE = """
    import json
    import torch
    from torch import nn
    from tilegym.errors import KernelError
    from tilegym.kernel import kernelize_model, register_external_layer, register_layer_kernel, report, registry
    from tilegym.kernel.function import register_function_kernel

    class SiluAndMul(nn.Module):
        def forward(self, x):
            x1, x2 = x.chunk(2, dim=-1)
            return nn.functional.silu(x1) * x2

    register_external_layer(SiluAndMul, "Kernel")

    def apply(mode="inference", **source):
        registry.clear()
        register_external_layer(SiluAndMul, "Kernel")
        register_layer_kernel("Kernel", layer_name="SiluAndMul", device="cpu", **source)
        try:
            model = kernelize_model(nn.Sequential(SiluAndMul()), mode, use_fallback=False)
        except KernelError as error:
            return str(error).splitlines()[-1].strip()
        x = torch.randn(2, 6)
        return torch.allclose(model(x), SiluAndMul()(x)) and report(model).replaced[0].source
"""

REPO = "kernels-community/activation"


def test_versions_revisions_and_what_is_missing(hub_cache):
    lay_out_hub_cache(hub_cache, "stranger/activation", {"__init__.py": HUB_INIT, "layers.py": HUB_LAYERS}, ("main",))
    lay_out_hub_cache(hub_cache, "stranger/broken", {"__init__.py": "import no_such_package"}, ("main",))
    code = f"""{PREPARE}
    print(json.dumps([
        apply(repo_id="{REPO}", version=1),
        apply(repo_id="{REPO}", revision="main"),
        apply(repo_id="{REPO}", revision="0123456789abcdef0123456789abcdef01234567"),
        apply(repo_id="{REPO}", version=2),
        apply(repo_id="{REPO}", version="0.1.0"),
        apply(repo_id="org/absent", version=1),
        apply(repo_id="org/absent"),
        apply(repo_id="stranger/broken"),
        apply(repo_id="stranger/activation", trust_remote_code=["stranger/activation"]),
        apply(repo_id="{REPO}", mode="compile", version=1),
    ]))
    registry.clear()
    register_layer_kernel("Kernel", repo_id="{REPO}", layer_name="Gelu", device="cpu")
    register_external_layer(SiluAndMul, "Kernel")
    try:
        kernelize_model(SiluAndMul(), use_fallback=False)
    except KernelError as error:
        print(str(error).splitlines()[-1])
    """
    lines = run_offline(code, hub_cache).splitlines()
    by_version, main, commit, version_2, release, absent, absent_main, broken, trusted, compiled = json.loads(lines[0])
    assert by_version == f"hub {REPO}@v1:SiluAndMul" and main == f"hub {REPO}@main:SiluAndMul"
    assert commit.endswith("cdef01234567:SiluAndMul") and compiled == by_version
    assert trusted == "hub stranger/activation@main:SiluAndMul"
    off = f"Hub access is off (HF_HUB_OFFLINE) and the cache {hub_cache} does not serve it: "
    where = "0 (SiluAndMul by 'Kernel'): hub "
    assert version_2 == f"{where}{REPO}@v2:SiluAndMul: {off}Version 2 not found, available versions: 1"
    assert release.startswith(f"{where}{REPO}@v0.1.0:SiluAndMul: {off}Cannot find a local snapshot for {REPO}")
    assert absent.startswith(f"{where}org/absent@v1:SiluAndMul: {off}Version 1 of 'org/absent' is not available")
    assert absent_main.startswith(f"{where}org/absent@main:SiluAndMul: {off}Cannot find a local snapshot")
    assert "ModuleNotFoundError: No module named 'no_such_package'" in broken
    assert "Layer `Gelu` not found in kernel repo" in lines[1]


HUB = """
    import http.server
    import threading

    class Hub(http.server.BaseHTTPRequestHandler):
        \"\"\"Knows two publishers, one of which it trusts, and no repository.\"\"\"

        def do_GET(self):
            publisher = self.path.split("/")[3]
            if self.path.startswith("/api/organizations/") and publisher != "nobody":
                body = {"name": publisher, "fullname": publisher, "trustedKernelPublisher": publisher == "friend"}
                self.answer(200, json.dumps(body).encode())
            else:
                self.answer(404, b"{}", ("X-Error-Code", "RepoNotFound"))

        def answer(self, status, body, *headers):
            self.send_response(status)
            for name, value in (("Content-Type", "application/json"), ("Content-Length", str(len(body))), *headers):
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    import os
    os.environ["HF_ENDPOINT"] = f"http://127.0.0.1:{server.server_port}"
"""


def test_trust_and_reachability(hub_cache):
    """With Hub access on, `kernels` asks the Hub whether the publisher is trusted, before anything is downloaded."""
    code = f"""
    import json
    {HUB}
    {PREPARE}
    for publisher, trust in (
        ("stranger", False),
        ("nobody", False),
        ("stranger", ["other/repo"]),
        ("friend", False),
        ("stranger", True),
        ("stranger", ["stranger/repo"]),
    ):
        print(apply(repo_id=f"{{publisher}}/repo", revision="main", trust_remote_code=trust))
    server.shutdown()
    server.server_close()
    print(apply(repo_id="friend/repo", version=1))
    """
    answers = run_offline(code, hub_cache, HF_HUB_OFFLINE="0").splitlines()
    assert len(answers) == 7, answers
    assert "'stranger/repo' is not from a trusted publisher. Set trust_remote_code=True" in answers[0]
    assert "'nobody/repo' could not verify publisher trust status" in answers[1]
    assert "is not from a trusted publisher" in answers[2]
    for trusted in answers[3:6]:
        assert trusted.endswith("the Hub has no such repository, or it is private: see `hf auth login`")
    assert "hub friend/repo@v1:SiluAndMul: the Hub (http://127.0.0.1:" in answers[6]
    assert ") cannot be reached: " in answers[6]


def test_without_the_package_kernels(hub_cache, local_repo):
    """Only the Hub needs it: classes, packages on disk and all modes work without. It is imported when it is needed."""
    code = f"""
    import sys
    import torch
    import tilegym.kernel
    print([m for m in ("kernels", "transformers", "pydantic", "huggingface_hub") if m in sys.modules])
    sys.modules["kernels"] = None
    {PREPARE}
    print(apply(repo_id="{REPO}", version=1))
    print(apply(repo_path="{hub_cache}"))
    registry.clear()
    register_layer_kernel("Local", repo_path="{local_repo}", package_name="my_kernels",
                          layer_name="Qwen2MLPTrainingKernel", device="cpu", mode="train")
    register_external_layer(nn.Linear, "Local")
    register_external_layer(nn.ReLU, "Class")
    register_layer_kernel("Class", layer_class=type("K", (nn.Module,), {{"forward": lambda self, input: input}}),
                          device="cpu")
    print(len(report(kernelize_model(nn.Sequential(nn.ReLU()), "train", use_fallback=False)).replaced))
    """
    imported, first, second, third = run_offline(code, hub_cache).splitlines()
    assert f"loading hub {REPO}@v1:SiluAndMul needs the package kernels: pip install 'tilegym[hub]'" in first
    assert "needs the package kernels: pip install 'tilegym[hub]'" in second
    assert third == "1" and imported == "[]"
