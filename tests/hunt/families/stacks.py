"""Equal layers one after the other, as models have them, with what connects them: skips, caches, statistics, masks."""

from __future__ import annotations

from tests.hunt.draft import Draft
from tests.hunt.families.wanted import floats


def layers(draft: Draft) -> None:
    """Three to five layers of a ModuleList."""
    x = draft.pick(lambda v: floats(2, 3)(v) and v.shape[-1] in (4, 6, 8))
    if x is None:
        return
    width, h, i = draft.value(x).shape[-1], draft.fresh(), draft.fresh("i")
    stack = draft.attribute(f"nn.ModuleList([{_layer(draft, width)} for _ in range({draft.choose(3, 4, 5)})])", "stack")
    if stack is None:
        return
    layer = f"{stack}[{i}]"
    start = draft.choose(x, f"{x} * 1.0", f"{x}.transpose(0, 1)", f"{x}.detach()")
    before, body, after, names = _connected(draft, h, i, layer, width)
    text = f"{h} = {start}\n{before}for {i} in range(len({stack})):\n    " + body.replace("\n", "\n    ") + f"\n{after}"
    draft.block(text, h, *names)


def _layer(draft: Draft, width: int) -> str:
    return draft.choose(
        f"nn.Sequential(nn.LayerNorm({width}), nn.Linear({width}, 8), nn.GELU(), nn.Linear(8, {width}))",
        f"nn.Sequential(nn.Linear({width}, {width}), nn.Tanh(), nn.Linear({width}, {width}), nn.Sigmoid())",
        f"nn.Sequential(nn.Linear({width}, {width}), nn.ReLU(inplace=True), nn.LayerNorm({width}), nn.Hardtanh())",
        f"nn.Sequential(nn.Linear({width}, 6), nn.SiLU(), nn.Linear(6, {width}), nn.Softmax(-1))",
    )


def _connected(draft: Draft, h: str, i: str, layer: str, width: int) -> tuple[str, str, str, list[str]]:
    """(what precedes the loop, its body, what follows, further names) of one way to connect layers."""
    residual = draft.choose(f"{h} = {h} + {layer}({h})", f"{h} = {layer}({h})", f"{h} = ({h} + {layer}({h})) * 0.5")
    kind = draft.choose(
        "plain", "states", "skips", "shared", "statistics", "numbered", "frozen", "in place", "views", "two", "checked"
    )
    if kind == "states":
        kept = draft.fresh("states")
        end = draft.choose(f"{kept} = torch.stack({kept})", f"{kept} = {kept}[1]", f"{kept} = sum({kept})")
        return f"{kept} = []\n", f"{residual}\n{kept}.append({h})", end, [kept]
    if kind == "skips":
        kept = draft.fresh("skips")
        taken = f"{h} = {h} + {kept}.pop({draft.choose(0, -1)})"
        return f"{kept} = [{h}]\n", f"{residual}\n{taken}\n{kept}.append({h} * 0.5)", f"{kept} = {kept}[-1]", [kept]
    if kind == "shared":
        scale = draft.attribute(f"nn.Parameter(torch.linspace(0.5, 1.5, {width}))", "scale")
        gate = draft.fresh("gate")
        return f"{gate} = torch.sigmoid({scale} * 2)\n", f"{residual}\n{h} = {h} * {gate}", "", []
    if kind == "statistics":
        state = draft.buffer(f"torch.zeros(5, {width})", "state")
        update = draft.choose(
            f"{state}[{i}].mul_(0.5).add_({h}.detach().reshape(-1, {width}).mean(0))",
            f"{state}[{i}] = {h}.detach().reshape(-1, {width}).amax(0)",
        )
        return "", f"{update}\n{residual}\n{h} = {h} + {state}[{i}] * 0.1", "", []
    if kind == "numbered":
        return (
            "",
            f"{residual}\n{h} = {h} * {draft.choose(f'(1 + {i})', f'0.5 ** {i}', f'(1.0 if {i} % 2 else 0.5)')}",
            "",
            [],
        )
    if kind == "frozen":
        return "", f"with torch.set_grad_enabled({i} > 1 and torch.is_grad_enabled()):\n    {residual}", "", []
    if kind == "in place":
        return f"{h} = {h} * 1.0\n", f"{h} {draft.choose('+=', '*=')} torch.tanh({layer}({h}.clone()))", "", []
    if kind == "views":
        part = draft.fresh("part")
        return "", f"{residual}\n{part} = {h}[..., :2]\n{h} = torch.cat([{part} * 2, {h}[..., 2:]], -1)", "", [part]
    if kind == "two":
        other = draft.fresh()
        crossed = f"{h}, {other} = {layer}({other}) + {h}, {layer}({h}) * {other}"
        return f"{other} = {h}.flip(0)\n", crossed, "", [other]
    if kind == "checked":
        return "", f"{h} = torch.utils.checkpoint.checkpoint({layer}, {h}, use_reentrant=False) + {h}", "", []
    return "", residual, "", []


def noting_layers(draft: Draft) -> None:
    """Layers whose forward changes Python objects: their own, or one that all of them hold; or with hooks inside."""
    x = draft.pick(lambda v: floats(2, 3)(v) and v.shape[-1] in (4, 6, 8))
    if x is None:
        return
    width, h, i = draft.value(x).shape[-1], draft.fresh(), draft.fresh("i")
    change, noted = draft.choose(*_CHANGES)
    name = draft.fresh("Noting")
    draft.define(_NOTING.format(name=name, change=change))
    held = draft.attribute("[]" if "append" in change else "{}", "held")
    stack = draft.attribute(
        f"nn.ModuleList([{name}({width}, {held}) for _ in range({draft.choose(2, 3, 4)})])", "stack"
    )
    if stack is None:
        return
    if draft.chance(4):
        draft.setup(f"{stack}[{draft.choose(0, 1, -1)}].linear.register_forward_hook(lambda m, a, out: out * 2)")
    calls = draft.choose(f"range(len({stack}))", "(0, 1, 0, 1)", "(1, 0, 0)")
    text = f"{h} = {x} * 1.0\nfor {i} in {calls}:\n    {h} = {h} + {stack}[{i}]({h})\n{h} = {h} + {noted.format(stack=stack, held=held)}"
    draft.block(text, h)


_NOTING = """
class {name}(nn.Module):
    def __init__(self, width, held):
        super().__init__()
        self.linear, self.held, self.calls = nn.Linear(width, width), held, 0
        self.register_buffer("total", torch.zeros(width))

    def forward(self, x):
        held = self.held
        {change}
        return torch.tanh(self.linear(x))
"""
_MEAN = "x.detach().reshape(-1, x.shape[-1]).mean(0)"
# (what the forward of a layer does, what the model reads of it)
_CHANGES = (
    ("pass", "0.0"),
    (f"self.total = self.total * 0.5 + {_MEAN}", "{stack}[0].total"),
    (f"self.total.mul_(0.5).add_({_MEAN})", "{stack}[0].total"),
    ("self.calls += 1", "0.1 * {stack}[1].calls"),
    (f"held.append({_MEAN})", "sum({held})"),
    (f"held['last'] = {_MEAN}", "{held}['last']"),
    ("held['calls'] = held.get('calls', 0) + 1", "0.1 * {held}['calls']"),
)

STEPS = (layers, noting_layers)
