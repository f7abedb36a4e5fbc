"""What is written in CUDA C++, built when it is first used."""
