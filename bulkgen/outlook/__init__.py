"""What a job will be like, before any engine is loaded."""

from bulkgen.outlook.outlook import Outlook, look_ahead
from bulkgen.outlook.page import outlook_json, outlook_tables

__all__ = ["Outlook", "look_ahead", "outlook_json", "outlook_tables"]
