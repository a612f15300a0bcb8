"""Messages and prompts; chats in which functions may be called, and models that think before they
answer.

An answer is bound by a grammar to calls that are valid (`Calls`), and read as it comes into a
thought, text and calls (`Parser`). Messages and tools are a stranger's: a name becomes part of a
grammar, a schema is compiled. So is an answer: what it holds is a call only where it names a tool.
"""

from tokenswift.chat.answers import Calls as Calls
from tokenswift.chat.answers import Reply as Reply
from tokenswift.chat.answers import ToolCall as ToolCall
from tokenswift.chat.answers import call_id as call_id
from tokenswift.chat.answers import gathered as gathered
from tokenswift.chat.answers import message_of as message_of
from tokenswift.chat.answers import thought_of as thought_of
from tokenswift.chat.parser import Delta as Delta
from tokenswift.chat.parser import Parser as Parser
from tokenswift.chat.tools import CHOICES as CHOICES
from tokenswift.chat.tools import Tools as Tools
from tokenswift.chat.tools import tools_of as tools_of
