"""The frames of the data plane and the messages of the control plane, and the checks of both."""
