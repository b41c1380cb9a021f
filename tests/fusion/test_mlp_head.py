"""Heads, a network's last layers with their loss and gradients as one kernel of a GPU: where the
fuse pass makes them. What they compute there is in test_gemm_epilogue.py.
"""

from __future__ import annotations

import unittest
from collections.abc import Sequence

import numpy as np

from dlsys import autodiff as ad
from dlsys.graph.node import Node, find_topo_sort
from dlsys.runtime.device import gpu
from dlsys.runtime.target import target_of
from fusion.test_gemm_epilogue import Network, feeds_of, fused
from support.devices import require
from support.fusion import fused as run_fusions
from support.graphs import operators, simplified, variable


class Heads(unittest.TestCase):
    def assert_becomes(self, fetches: Sequence[Node], *names: str) -> list[Node]:
        found = fused(fetches, gpu=True)
        self.assertEqual(operators(found), sorted(names))
        return found

    def test_a_network_of_small_layers_is_one_head_on_a_gpu(self) -> None:
        head = "fused_sparse_mlp_head"
        net = Network((9,), (7, 6, 8, 5))
        found = self.assert_becomes(net.fetches, head, *["matmul_sums"] * 3)
        (node,) = (x for x in find_topo_sort(found) if x.op.name == head)
        found_layers = [(one.activation, one.dact) for one in node.attrs["layers"]]
        relu = ("relu", "relu_gradient")
        self.assertEqual(found_layers, [("relu", ""), relu, ("", "relu_gradient")])
        self.assertNotIn(head, operators(fused(net.fetches)))  # and on no other device

    def test_the_body_of_a_head_computes_the_network(self) -> None:
        net = Network((9,), (7, 6, 5))
        feeds = feeds_of(net.fetches)
        arrays = {x.name: value for x, value in feeds.items()}
        arrays |= {p.name: p.asnumpy() for p in net.parameters}
        arrays["workspace"] = np.zeros(512, np.int32)
        (head,) = (x for x in find_topo_sort(fused(net.fetches, gpu=True)) if "layers" in x.attrs)
        made = [np.empty(spec.shape, spec.dtype) for spec in head.spec]
        head.op.numpy(head, *(arrays[x.name] for x in head.inputs), *made)
        loss, dw0, db0, dw1, db1 = ad.Executor(net.fetches).run(feeds)
        np.testing.assert_allclose(made[0], loss, rtol=1e-5)
        _, dlogits, hidden, dhidden = made
        for found, wanted in (
            (dlogits.sum(axis=0), db1), (hidden.T @ dlogits, dw1),
            (dhidden.sum(axis=0), db0), (arrays["x"].T @ dhidden, dw0),
        ):  # fmt: skip
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)

    def test_heads_of_other_forms(self) -> None:
        for options in (
            {"transposed": True, "dense": True, "reduction": "sum"},
            {"activation": ad.gelu_op},
            {"activation": ad.tanh_op, "transposed": True},
        ):
            for batch, widths in (
                ((9,), (7, 6, 5)),
                ((3, 4), (7, 6, 5)),
                ((3, 4), (7, 1100, 6, 5)),
            ):
                with self.subTest(batch=batch, widths=widths, **options):
                    net = Network(batch, widths, **options)
                    names = operators(fused(net.fetches, gpu=True))
                    heads = [name for name in names if name.endswith("_head")]
                    self.assertEqual(len(heads), 1)
                    self.assertFalse([name for name in names if name.endswith("_cross_entropy")])

    @require(gpu(0))
    def test_a_head_begins_where_layers_are_small_enough(self) -> None:
        names = ["matmul_bias"] * 2 + ["matmul_gradient"] + ["matmul_sums"] * 3
        head = "fused_sparse_mlp_head"
        for batch in ((9,), (3, 4)):
            net = Network(batch, (7, 1100, 6, 5))
            fusions = "cross_entropy", "gemm_epilogue", "mlp_head"
            found = run_fusions(simplified(net.fetches), *fusions, target=target_of(gpu(0)))
            self.assertEqual(operators(found), sorted([*names, head]))

    def test_logits_that_somebody_reads_make_no_head(self) -> None:
        net = Network((9,), (7, 5))
        logits = ad.linear_op(net.x, *net.parameters)
        loss = ad.softmax_cross_entropy(logits, net.labels)
        fetches = [loss, *ad.gradients(loss, net.parameters)]
        kernel = "fused_sparse_cross_entropy"
        names = ["matmul_bias", "matmul_sums"]
        self.assert_becomes([*fetches, logits], *names, kernel)
        self.assert_becomes([*fetches, ad.exp_op(logits)], *names, kernel, "exp")

    def test_rows_that_are_cut_anew_end_a_head(self) -> None:
        labels = variable("labels", 12, dtype=np.dtype(np.int64))
        x, w, v = variable("x", 6, 4), variable("w", 4, 10), variable("v", 5, 3)
        hidden = ad.matmul_op(x, w)
        kernel, head = "fused_sparse_cross_entropy", "fused_sparse_mlp_head"
        loss = ad.softmax_cross_entropy(ad.reshape_op(hidden, (12, 5)), labels)
        fetches = [loss, *ad.gradients(loss, [w])]
        self.assert_becomes(fetches, "matmul", "matmul", kernel)
        cut = ad.reshape_op(ad.relu_op(hidden), (12, 5))
        loss = ad.softmax_cross_entropy(ad.matmul_op(cut, v), labels)
        fetches = [loss, *ad.gradients(loss, [v])]
        found = self.assert_becomes(fetches, "matmul_map", "matmul", head)
        (node,) = (x for x in find_topo_sort(found) if x.op.name == head)
        self.assertEqual(len(node.attrs["layers"]), 1)

    def test_a_loss_that_needs_another_ones_gradient_makes_no_cycle(self) -> None:
        first, second = Network((9,), (7, 6, 5)), Network((9,), (7, 6, 5))
        outer = ad.linear_op(
            ad.matmul_op(second.x, ad.exp_op(first.gradients[0])), *second.parameters[2:]
        )
        loss = ad.softmax_cross_entropy(outer, second.labels)
        found = fused([first.loss, loss, *ad.gradients(loss, second.parameters[2:])], gpu=True)
        find_topo_sort(found)  # raises on a cycle
        heads = [name for name in operators(found) if name.endswith("_head")]
        self.assertEqual(len(heads), 2)

    def test_labels_that_a_layer_of_the_head_makes_keep_it_apart(self) -> None:
        x, w, v = variable("x", 6, 5), variable("w", 5, 5), variable("v", 5, 5)
        hidden = ad.relu_op(ad.matmul_op(x, w))
        labels = ad.softmax_op(hidden)
        loss = ad.softmax_cross_entropy(ad.matmul_op(hidden, v), labels)
        found = fused([loss, *ad.gradients(loss, [v])], gpu=True)
        find_topo_sort(found)  # raises on a cycle
        self.assertNotIn("fused_mlp_head", operators(found))
