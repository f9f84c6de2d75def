"""The tests of the public-report cases, bad input and the Python surface, on CUDA (conftest.py leaves
out what takes no device)."""

from test_api import *  # noqa: F401, F403
from test_compose_radix import *  # noqa: F401, F403
from test_errors import *  # noqa: F401, F403
from test_exactness import *  # noqa: F401, F403
from test_fp8 import *  # noqa: F401, F403
from test_invariant import *  # noqa: F401, F403
from test_masks import *  # noqa: F401, F403
from test_plan_page import test_plan_of_an_attention_has_its_cost_model  # noqa: F401
from test_reports_plans import *  # noqa: F401, F403
from test_reports_sizes import *  # noqa: F401, F403
from test_reports_states import *  # noqa: F401, F403
from test_reports_strides import *  # noqa: F401, F403
from test_reports_tables import *  # noqa: F401, F403
from test_reports_values import *  # noqa: F401, F403
from test_reports_visibility import *  # noqa: F401, F403
