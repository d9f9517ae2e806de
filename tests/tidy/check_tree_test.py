#!/usr/bin/env python3
"""check_tree.py finds what it is for, and nothing else."""
import unittest

import check_tree


class CheckTree(unittest.TestCase):
    def test_the_planner_may_not_see_a_transport(self):
        faults = list(check_tree.include_faults("planner/plan.cc", '#include "tensorbus/transport/transport.h"\n'))
        self.assertEqual(len(faults), 1)
        self.assertIn("planner may not include tensorbus/transport", faults[0])

    def test_allowed_arrows_are_silent(self):
        text = '#include "planner/plan.h"\n#include "tensorbus/types/box.h"\n#include <vector>\n'
        self.assertEqual(list(check_tree.include_faults("planner/plan.cc", text)), [])

    def test_the_agent_sees_only_the_wire_part_of_the_shim(self):
        self.assertEqual(list(check_tree.include_faults("agent/a.cc", '#include "worker_shim/wire.h"\n')), [])
        self.assertTrue(list(check_tree.include_faults("agent/a.cc", '#include "worker_shim/tensorbus_shim.h"\n')))

    def test_heavy_headers_stay_in_their_place(self):
        self.assertTrue(list(check_tree.include_faults("agent/a.h", "#include <grpcpp/grpcpp.h>\n")))
        self.assertTrue(list(check_tree.include_faults("planner/a.cc", "#include <CLI/CLI.hpp>\n")))
        self.assertEqual(list(check_tree.include_faults("agent/main.cc", "#include <CLI/CLI.hpp>\n")), [])

    def test_absolute_paths_are_found(self):
        self.assertTrue(list(check_tree.path_faults("a.md", "see /" + "home/somebody/x")))
        self.assertEqual(list(check_tree.path_faults("a.md", "see /usr/include and ~/work/x and $HOME/work/y")), [])


if __name__ == "__main__":
    unittest.main()
