"""What the course needs beside the engines: ranks for a notebook, exercises, and the checks that grade them."""
