"""Compile chat templates: Jinja's generated code, with calls added that charge for its work (see `work`).

Every Jinja block begins by charging for all that it may run. An operation that may be large is replaced by a call of a
method of the environment (`sandbox`), which charges first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame, operators

from raytune_fsdp.data.rows.work import PER_NODE

# Names that templates ask for all the time. Jinja looks for an attribute first, which takes ten times as long for a
# dict.
ATTRIBUTES_OF_DICTS = frozenset(dir(dict))
SAFE_OF_LOOPS = frozenset(("depth", "depth0", "first", "index", "index0", "last", "length", "revindex", "revindex0"))

_CALL = 10  # a call takes as long as this many other nodes


class CountingGenerator(CodeGenerator):
    """Jinja's compiler, which also writes the calls that charge for the work."""

    def blockvisit(self, nodes: Iterable[nodes.Node], frame: Frame) -> None:
        body = list(nodes)
        if not frame.soft_frame:  # the branches of an `if` belong to the Jinja block around it
            self.writeline(f"environment.charge({PER_NODE * (1 + sum(map(_size, body)))})")
        super().blockvisit(body, frame)

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        if node.test is not None:  # the test runs for items that the body never sees
            cost = nodes.Const(PER_NODE * (1 + _CALL + _size(node.test)))
            call = nodes.Call(nodes.EnvironmentAttribute("charged"), [cost], [], None, None)
            node.test = nodes.And(call, node.test)
        super().visit_For(node, frame)

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:
        if (
            len(node.ops) == 1
            and (_is_constant(node.expr) or _is_constant(node.ops[0].expr))
            and "in" not in node.ops[0].op
        ):
            return super().visit_Compare(node, frame)  # comparing with a short text is soon done
        self.write("(")
        self._checked("compared", node.expr, frame)
        for operand in node.ops:
            self.write(f" {operators[operand.op]} ")
            self._checked("searched" if "in" in operand.op else "compared", operand.expr, frame)
        self.write(")")
        return None

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        markup = frame.eval_ctx.autoescape or frame.eval_ctx.volatile
        self.write(f"{'markup_join' if markup else 'str_join'}(environment.joined((")
        for each in node.nodes:
            self.visit(each, frame)
            self.write(", ")
        self.write(")))")

    def visit_Add(self, node: nodes.BinExpr, frame: Frame) -> None:
        """Make `a + b + c` one call: most of what templates write is such a sum."""
        terms: list[nodes.Expr] = [node.right]
        while isinstance(node.left, nodes.Add):
            node = node.left
            terms.append(node.right)
        self.write("environment.added(context, (")
        for term in (node.left, *reversed(terms)):
            self.visit(term, frame)
            self.write(", ")
        self.write("))")

    def visit_Getattr(self, node: nodes.Getattr, frame: Frame) -> None:
        self._looked_up(node, node.attr, frame, super().visit_Getattr)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self.write("{")
        for item in node.items:
            self._checked("compared", item.key, frame)
            self.write(": ")
            self.visit(item.value, frame)
            self.write(", ")
        self.write("}")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if not isinstance(node.arg, nodes.Slice):
            key = node.arg.value if isinstance(node.arg, nodes.Const) else None
            self._looked_up(node, key, frame, super().visit_Getitem)
            return
        self.write("environment.sliced(")
        self.visit(node.node, frame)
        self.write("[")
        self.visit(node.arg, frame)
        self.write("])")

    def _looked_up(
        self, node: nodes.Getattr | nodes.Getitem, key: Any, frame: Frame, otherwise: Callable[[Any, Frame], None]
    ) -> None:
        """Write `message.role` and `loop.first` without a call for the types that they nearly always have."""
        quick = None
        if isinstance(node.node, nodes.Name) and isinstance(key, str):
            ref = frame.symbols.ref(node.node.name)
            if key not in ATTRIBUTES_OF_DICTS:
                quick = f"({ref}[{key!r}] if type({ref}) is dict and {key!r} in {ref} else "
            if key in SAFE_OF_LOOPS and isinstance(node, nodes.Getattr) and node.node.name == "loop":
                quick = f"({ref}.{key} if type({ref}) is LoopContext else "
        if quick is not None:
            self.write(quick)
        otherwise(node, frame)
        if quick is not None:
            self.write(")")

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        if frame.eval_ctx.volatile or frame.eval_ctx.autoescape:
            super()._output_child_pre(node, frame, finalize)
        self.write("environment.printed(")

    def _output_child_post(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        self.write(")")
        if frame.eval_ctx.volatile or frame.eval_ctx.autoescape:
            super()._output_child_post(node, frame, finalize)

    def _checked(self, how: str, node: nodes.Expr, frame: Frame) -> None:
        if _is_literal(node):
            self.visit(node, frame)
        else:
            self.write(f"environment.{how}(")
            self.visit(node, frame)
            self.write(")")


def _is_constant(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Const)


def _is_literal(node: nodes.Node) -> bool:
    return _is_constant(node) or (isinstance(node, nodes.List | nodes.Tuple) and all(map(_is_constant, node.items)))


def _size(node: nodes.Node) -> int:
    """Return the number of nodes that run with this one, without Jinja blocks, which charge for themselves."""
    apart = isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock | nodes.Block | nodes.FilterBlock)
    exclude = ("body", "else_") if apart else ()
    # Each text that is written is kept as an object, which takes more than its characters.
    own = 4 * len(node.nodes) if isinstance(node, nodes.Output) else _CALL if isinstance(node, nodes.Call) else 1
    return own + sum(map(_size, node.iter_child_nodes(exclude=exclude)))
