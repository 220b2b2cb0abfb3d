"""What the traced step is: operations, values, regions and how they nest."""
