# Whether a shared library exports the C functions and the C++ interface, and nothing else.
# Wants: library, nm.
execute_process(COMMAND ${nm} --dynamic --defined-only --format=posix ${library} OUTPUT_VARIABLE symbols
    COMMAND_ERROR_IS_FATAL ANY)
string(REGEX MATCHALL "[^\n]+" lines "${symbols}")
set(functions 0)
foreach(line IN LISTS lines)
  string(REGEX REPLACE " .*" "" symbol "${line}")
  if(symbol MATCHES "^stepgraph_[a-z_]+$")
    math(EXPR functions "${functions} + 1")
  elseif(NOT symbol MATCHES "^_Z(N|NK|TIN|TSN|TVN)9stepgraph" OR symbol MATCHES "8Pipeline(5Bound|5Parts|9Capturing)")
    message(FATAL_ERROR "${symbol} is exported, must not be")
  endif()
endforeach()
if(NOT functions EQUAL 16)
  message(FATAL_ERROR "${functions} C functions are exported, must be 16")
endif()
