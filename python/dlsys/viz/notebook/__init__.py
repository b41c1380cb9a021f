"""Objects in notebooks: the HTML that their `_repr_html_` gives.

Each function takes the object and returns a fragment that needs nothing from elsewhere, has the
colors of the notebook, light or dark, and a text for every picture.
"""

from .arrays import array_html, values_html
from .graphs import executor_html, graph_html, plan_html
from .tables import counters_html, profile_html, report_html, text_html
from .training import history_html, module_html, summary_html
