import glob, importlib, itertools, os, sys, warnings
import registry, numpy as np, torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map, tree_leaves
warnings.filterwarnings("ignore")
torch.manual_seed(0)
nan, inf = float("nan"), float("inf")
F = torch.nn.functional
for f in sorted(glob.glob("/tmp/corpus3/i_*.py")):
    importlib.import_module(os.path.basename(f)[:-3])
import i_oracle
from i_oracle import SPEC

FL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
isT = lambda t: isinstance(t, Tensor)
def leaves(o): return [t for t in tree_leaves(o) if isT(t)]
def copy(args, grad=False):
    def one(t):
        if not isT(t): return t
        c = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) if t._is_view() or not t.is_contiguous() else None
        if 0 in t.stride() and t.numel() : 
            idx = tuple(slice(0, 1) if s == 0 else slice(None) for s in t.stride())
            return t.detach()[idx].clone().expand(t.shape).requires_grad_(grad and t.requires_grad)
        c = t.detach().clone() if c is None else c.copy_(t.detach())
        return c.requires_grad_(grad and t.requires_grad)
    return tree_map(one, args)
def bits(t): return t.detach().contiguous().view(torch.uint8) if t.dtype.itemsize == 1 and t.dtype.is_floating_point else t.detach()
def same(a, b):
    if not isT(a): return a == b
    a, b = bits(a), bits(b)
    return a.dtype == b.dtype and a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan() if a.is_floating_point() or a.is_complex() else a == b)).all())
TOL = {torch.float16: (2e-3, 2e-3), torch.bfloat16: (2e-2, 2e-2), torch.float32: (1e-4, 1e-5), torch.float64: (1e-9, 1e-10), torch.complex64: (1e-4, 1e-5), torch.complex128: (1e-9, 1e-10)}
def close(got, want, what):
    g, w = tree_leaves(got), tree_leaves(want)
    assert len(g) == len(w), (what, len(g), len(w))
    for a, b in zip(g, w):
        if not isT(a): assert a == b, (what, a, b); continue
        assert a.shape == b.shape, (what, a.shape, b.shape)
        if a.dtype.itemsize == 1 and a.dtype.is_floating_point: assert same(a, b.to(a.dtype)), (what, a, b); continue
        if a.dtype.is_floating_point or a.dtype.is_complex:
            r, t = TOL[a.dtype]
            torch.testing.assert_close(a.detach(), b.to(a.dtype), rtol=r, atol=t, equal_nan=True, msg=lambda m: f"{what}: {m}")
        else: assert a.dtype == b.dtype and torch.equal(a, b), (what, a, b)
def variants(args):
    yield "plain", args
    flat = leaves(args)
    for i, t in enumerate(flat):
        def sub(new): 
            it = iter(range(len(flat)))
            return tree_map(lambda u: (new if next(it) == i else u) if isT(u) else u, args)
        if t.dim() >= 2: yield f"transposed{i}", sub(t.detach().mT.contiguous().mT)
        if t.dim() >= 1 :
            big = torch.zeros((t.shape[0], *t.shape[1:-1], t.shape[-1] * 2 + 1) if t.dim() > 1 else (t.shape[0] * 2 + 1,), dtype=t.dtype)
            v = big[..., 1::2]; v.copy_(t.detach()); yield f"strided{i}", sub(v)
            if t.shape[0] > 0: yield f"expanded{i}", sub(t.detach()[:1].expand(t.shape))
        off = torch.zeros(t.numel() + 3, dtype=t.dtype)[3:].view(t.shape); off.copy_(t.detach()); yield f"offset{i}", sub(off)
    yield "grad", tree_map(lambda t: t.detach().requires_grad_() if isT(t) and t.is_floating_point() else t, args)
def fake_of(op, args, real, what):
    cp = copy(args)
    with FakeTensorMode() as m:
        fa = tree_map(lambda t: m.from_tensor(t) if isT(t) else t, cp)
        out = op(*fa)
    for a, b in zip(leaves(out), leaves(real), strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype), (what, a.shape, a.stride(), a.dtype, b.shape, b.stride(), b.dtype)
REF = (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError)
def one(op, spec, args, what, may_refuse=False):
    mut, rnd = spec.get("mut", ()), spec.get("random")
    a1, a2, a3 = copy(args), copy(args), copy(args)
    # copy() loses overlap of expanded only for written; keep
    ctx = torch.no_grad()
    try:
        with ctx:
            if rnd: torch.manual_seed(5)
            r1 = op(*a1)
            if rnd: torch.manual_seed(5)
            r2 = op(*a2)
    except REF as e:
        if may_refuse: return "refused"
        raise AssertionError((what, "raised", str(e)[:300]))
    for a, b in zip(tree_leaves(r1), tree_leaves(r2), strict=True): assert same(a, b), (what, "not repeatable")
    for i, (a, b) in enumerate(zip(a1, args)):
        if i in mut: continue
        for x, y in zip(leaves(a), leaves(b), strict=True): assert same(x, y.detach()), (what, "argument changed", i)
    stor = {t.untyped_storage().data_ptr() for t in leaves(a1) if t.numel()}
    outs = [t for t in leaves(r1) if t.numel()]
    if not spec.get("returns_arg"):
        assert not any(t.untyped_storage().data_ptr() in stor for t in outs), (what, "alias")
        assert len({t.untyped_storage().data_ptr() for t in outs}) == len(outs)
    with ctx:
        if rnd: torch.manual_seed(5)
        want = spec["oracle"](*copy(args), *([r1] if spec.get("sees_result") else []))
    got = [r1] if mut == () else [([] if r1 is None else [r1]), *[a1[i] for i in mut]]
    if want is not True:
        close(got if mut else r1, want, what)
    if spec.get("ref") and not rnd:
        with ctx: want = op.reference(*copy(args), *spec.get('defaults', ())[len(args):])
        if not mut: close(r1, want, what + " reference")
        else: close([*leaves(r1), *[a1[i] for i in mut]], list(want) if isinstance(want, (tuple, list)) else [want], what + " reference")
    if not spec.get("dynamic"): fake_of(op, args, r1, what)
    else:
        cp = copy(args)
        with FakeTensorMode(shape_env=torch.fx.experimental.symbolic_shapes.ShapeEnv()) as m:
            fo = op(*tree_map(lambda t: m.from_tensor(t) if isT(t) else t, cp))
        for a, b in zip(leaves(fo), leaves(r1), strict=True): assert a.dtype == b.dtype and a.dim() == b.dim()
def fill(args, op_):
    return tree_map(lambda t: op_(t.detach().clone()) if isT(t) and t.dtype in (torch.float32, torch.float64) else t, args)
def poke(v):
    def f(t):
        if t.numel(): t.view(-1)[t.numel() // 2] = v
        return t
    return f
def leafy(args, spec):
    force = spec.get("force", ())
    args = tuple(t.detach().requires_grad_() if isT(t) and i in force and t.is_floating_point() else t for i, t in enumerate(args))
    if not any(t.requires_grad for t in leaves(args)) and spec.get("grad"):
        args = tree_map(lambda t: t.detach().requires_grad_() if isT(t) and (t.is_floating_point() or t.is_complex()) and not spec.get("mut") else t, args)
    return copy(args, True)
def run(case):
    op = case.make(); num = int(case.name.split("_")[1]); spec = SPEC[num]; n = refused = 0
    samples = [tuple(s.args) if hasattr(s, "args") else tuple(s) for s in op.samples()] if callable(getattr(op, "samples")) else [tuple(s.args) if hasattr(s, "args") else tuple(s) for s in op.samples]
    assert len(samples) >= 2
    for si, args in enumerate(samples):
        for kind, v in variants(args):
            must = kind == "plain" or kind == "grad" or not spec.get("picky")
            res = one(op, spec, v, f"{num} s{si} {kind}", may_refuse=not must or (kind.startswith("expanded") and (spec.get("mut") or spec.get("data"))))
            n += 1; refused += res == "refused"
        for dt in FL:
            v = tree_map(lambda t: t.detach().to(dt) if isT(t) and t.is_floating_point() else t, args)
            n += 1; refused += one(op, spec, v, f"{num} s{si} {dt}", may_refuse=True) == "refused"
        for val in (nan, inf, -inf, 0.0, *([1e20, -3e19, 60000.0] if spec.get("ref") or spec.get("big") else [])):
            for dt in (torch.float32, torch.float64):
                v = tree_map(lambda t: t.to(dt) if isT(t) and t.is_floating_point() else t, fill(args, poke(val)))
                n += 1; refused += one(op, {**spec, "oracle": spec.get("special", spec["oracle"])}, v, f"{num} s{si} special {val}", may_refuse=bool(spec.get("finite")) or True if spec.get("finite") else False) == "refused"
        torch.set_default_dtype(torch.float64)
        one(op, spec, args, f"{num} default dtype"); torch.set_default_dtype(torch.float32)
    for i, v in enumerate(spec.get("hard", lambda: [])()): one(op, spec, v, f"{num} hard{i}"); n += 1
    for i, v in enumerate(spec.get("bad", lambda: [])()):
        try: op(*copy(v))
        except REF: n += 1; continue
        raise AssertionError((num, "bad accepted", i))
    g = spec.get("grad")
    if g:
        for args in samples:
            if spec.get("force"): args = tuple(t.detach().requires_grad_() if isT(t) and i in spec["force"] else t for i, t in enumerate(args))
            if not any(t.requires_grad for t in leaves(args)): continue
            d = tree_map(lambda t: t.detach().to(torch.complex128 if t.is_complex() else torch.float64 if g != "f32g" else t.dtype).requires_grad_(t.requires_grad) if isT(t) and (t.is_floating_point() or t.is_complex()) else t, args)
            if g in ("oracle", "f32g"): # gradient compared with autograd of a formula
                fo = spec["goracle"]
                for dd in [d]:
                    o = op(*dd); q = fo(*dd)
                    o = [t for t in leaves(o) if t.requires_grad]; q = leaves(q)[:len(o)]
                    w = [torch.randn_like(t) for t in o]; xs = [t for t in leaves(dd) if t.requires_grad]
                    ga = torch.autograd.grad(o, xs, w, retain_graph=True); gb = torch.autograd.grad(q, xs, w)
                    close(list(ga), list(gb), f"{num} gradient")
                    if spec.get("once"):
                        o = op(*dd); o = [t for t in leaves(o) if t.requires_grad]
                        ws = [t.clone().requires_grad_() for t in w]
                        gg = torch.autograd.grad(o, xs, ws, create_graph=True)
                        try: torch.autograd.grad(sum(t.sum() for t in gg), xs); raise AssertionError("double backward passes")
                        except RuntimeError: pass
                n += 1; continue
            spec_flat, tree = torch.utils._pytree.tree_flatten(d)
            pos = [i for i, t in enumerate(spec_flat) if isT(t) and t.requires_grad]
            def fn(*xs):
                f = list(spec_flat)
                for i, x in zip(pos, xs): f[i] = x
                f = [t.clone() if isT(t) and (spec.get("mut")) else t for t in f]
                if spec.get("random"): torch.manual_seed(7)
                a = torch.utils._pytree.tree_unflatten(f, tree); o = op(*a)
                return tuple(t for t in [*leaves(o), *(u for m in spec.get("mut", ()) for u in leaves(a[m]))] if t.requires_grad)
            xs = tuple(spec_flat[i] for i in pos)
            assert torch.autograd.gradcheck(fn, xs), num
            if spec.get("once"):
                try: torch.autograd.gradgradcheck(fn, xs); raise AssertionError("double backward passes")
                except RuntimeError: pass
            else: assert torch.autograd.gradgradcheck(fn, xs), num
            n += 1
    if g:  # backward of empty and hard inputs, with expanded gradients, and under another default dtype
        for args in [*samples, *spec.get("hard", lambda: [])()]:
            for dd in (torch.float32, torch.float64):
                torch.set_default_dtype(dd)
                try:
                    d = leafy(args, spec)
                    xs = [t for t in leaves(d) if t.requires_grad]
                    e = tree_map(lambda t: t.clone() if isT(t) and spec.get("mut") else t, d)
                    if spec.get("random"): torch.manual_seed(1)
                    o = op(*e)
                    outs = [t for t in [*leaves(o), *(u for m in spec.get("mut", ()) for u in leaves(e[m]))] if t.requires_grad]
                    if not outs: continue
                    gs = torch.autograd.grad([t.sum() for t in outs], xs, [torch.ones_like(t.sum()) for t in outs], allow_unused=True)
                    for x, y in zip(xs, gs):
                        assert y is None or (y.shape == x.shape and y.dtype == x.dtype), (num, "gradient like its input")
                finally: torch.set_default_dtype(torch.float32)
                n += 1
    if "vmap" in sys.argv and not spec.get("mut") and not spec.get("dynamic") and not spec.get("random") and num not in (413,):
        for args in samples[:2]:
            stacked = tree_map(lambda t: torch.stack([t.detach(), t.detach().flip(0) if t.dim() else t.detach() * 2]) if isT(t) and num not in (445,) else t, args)
            flat, tree = torch.utils._pytree.tree_flatten(stacked)
            if num == 445: flat[0] = torch.stack([flat[0], flat[0] * 2]); pos = [0]
            else: pos = [i for i, t in enumerate(flat) if isT(t)]
            def call(*xs):
                f = list(flat)
                for i, x in zip(pos, xs): f[i] = x
                return op(*torch.utils._pytree.tree_unflatten(f, tree))
            got = torch.vmap(call)(*[flat[i] for i in pos])
            each = [leaves(call(*[flat[i][j] for i in pos])) for j in range(2)]
            close(leaves(got), [torch.stack(p) if p[0].dtype.itemsize > 1 else torch.stack(p) for p in zip(*each)], f"{num} vmap")
            n += 1
    if "compile" in sys.argv and not spec.get("nocompile"):
        torch._dynamo.reset()
        for args in samples:
            torch._dynamo.reset(); res = []
            for how in (lambda f: f, lambda f: torch.compile(f, backend="aot_eager", dynamic=True, fullgraph=True)):
                d = leafy(args, spec); xs = [t for t in leaves(d) if t.requires_grad]
                e = tree_map(lambda t: t.clone() if isT(t) and spec.get("mut") else t, d)
                if spec.get("random"): torch.manual_seed(3)
                y = how(lambda *z: op(*z))(*e)
                outs = [t for t in [*leaves(y), *(u for m in spec.get("mut", ()) for u in leaves(e[m]))]]
                gr = [t for t in outs if t.requires_grad]
                w = torch.Generator().manual_seed(1)
                gs = torch.autograd.grad(gr, xs, [torch.randn(t.shape, dtype=t.dtype, generator=w) for t in gr]) if gr and not spec.get("dynamic") else []
                res.append([t.detach() for t in [*outs, *gs]])
            close(res[1], res[0], f"{num} compiled")
            n += 1
    print(f"{num} {case.name} holds: {n} inputs, {refused} refused", flush=True)
if __name__ == "__main__":
    pick = [int(a) for a in sys.argv[1:] if a.isdigit()]; good = total = 0
    for case in registry.RIGHT:
        num = int(case.name.split("_")[1])
        if pick and not pick[0] <= num <= pick[-1]: continue
        total += 1
        try: run(case); good += 1
        except Exception as e:
            import traceback; torch.set_default_dtype(torch.float32)
            print(f"{num} {case.name} FAILS: {type(e).__name__} {str(e)[:700]}", flush=True)
            if "trace" in sys.argv: traceback.print_exc()
    print(f"{good} of {total} hold")
