"""The flags by which a script that asks a server shows who it is, and whom it believes.

from launch.papers import credentials
credentials(token_file)                        # after flags are parsed
"""

from absl import flags

from jdisagg.service.connection import Credentials

_AUTHORITY = flags.DEFINE_string("authority", "", "PEM file of who signed the server's certificate; with it TLS is spoken.")
_CERTIFICATE = flags.DEFINE_string("certificate", "", "PEM file of our own certificate, where the server asks for one.")
_KEY = flags.DEFINE_string("key", "", "PEM file of its key.")
_SERVER_NAME = flags.DEFINE_string("server_name", "", "The name in the server's certificate, where it is not the one in --target.")


def credentials(token_file: str) -> Credentials:
    """`token_file`: holds our bearer token; "" where the server asks for none. Raises ConfigError naming a file that is no such."""
    return Credentials.load(
        authority=_AUTHORITY.value, certificate=_CERTIFICATE.value, key=_KEY.value, token=token_file, server_name=_SERVER_NAME.value
    )
