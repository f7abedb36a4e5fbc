"""Traffic over stage boundaries: logged as it is sent, and fed again to a stage that replays alone."""
