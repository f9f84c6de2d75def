"""The tests of the public-report cases, bad input and the Python surface, on CUDA."""

from test_api import *  # noqa: F401, F403
from test_errors import *  # noqa: F401, F403
from test_reports import *  # noqa: F401, F403

# Of the host alone: they have run there.
for _name in ("test_readme_example", "test_torch_tensors_give_the_bits_of_numpy",
              "test_torch_views_are_not_copied", "test_plans_print_and_compare", "test_kernel_names",
              "test_read_only_inputs_pass_and_read_only_outputs_do_not", "test_what_is_no_tensor_is_named",
              "test_bad_configurations", "test_bad_formats_and_variants", "test_bad_workspaces",
              "test_streams_start_as_stated"):
    del globals()[_name]
