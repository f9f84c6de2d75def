"""The tests of the public-report cases, bad input and the Python surface, on CUDA."""

from test_api import *  # noqa: F401, F403
from test_compose_radix import *  # noqa: F401, F403
from test_errors import *  # noqa: F401, F403
from test_exactness import *  # noqa: F401, F403
from test_fp8 import *  # noqa: F401, F403
from test_masks import *  # noqa: F401, F403
from test_plan_page import test_plan_of_an_attention_has_its_cost_model  # noqa: F401
from test_reports_plans import *  # noqa: F401, F403
from test_reports_sizes import *  # noqa: F401, F403
from test_reports_states import *  # noqa: F401, F403
from test_reports_strides import *  # noqa: F401, F403
from test_reports_tables import *  # noqa: F401, F403
from test_reports_values import *  # noqa: F401, F403
from test_reports_visibility import *  # noqa: F401, F403

# Of the host alone: they have run there.
for _name in ("test_readme_example", "test_torch_tensors_give_the_bits_of_numpy",
              "test_torch_views_are_not_copied", "test_plans_print_and_compare", "test_kernel_names",
              "test_read_only_inputs_pass_and_read_only_outputs_do_not", "test_what_is_no_tensor_is_named",
              "test_bad_configurations", "test_bad_formats_and_variants", "test_bad_workspaces",
              "test_bad_masks_leave_the_plan_before",
              "test_a_mask_needs_a_variant_that_takes_one",
              "test_tiles_before_the_first_masked_key_need_no_mask",
              "test_rotary_dim_beyond_the_head_is_refused",
              "test_tensors_of_the_wrong_size_are_refused",
              "test_order_of_the_parts_is_the_order_of_their_work", "test_reference_has_torch_s_codes",
              "test_levels_hold_the_pages_of_every_path", "test_hashes_share_what_is_equal",
              "test_hashes_as_a_tree", "test_equal_requests_are_not_joined",
              "test_hidden_keys_are_not_worth_sharing", "test_levels_go_to_the_nodes_that_save_most",
              "test_given_levels_are_explained", "test_bad_trees_are_refused",
              "test_the_good_ones_pass", "test_what_is_no_argument",
              "test_nodes_that_can_be_joined_with_nothing_need_levels",
              "test_more_levels_than_the_format_has"):
    del globals()[_name]
