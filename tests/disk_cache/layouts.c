/* Compares kp_dynamo's declarations of the PJRT C API with the header of a plugin. Compiling it is the test. */
#include "kp_dynamo/disk_cache/native/pjrt_api.h"
#include "pjrt_c_api.h"

#define AT(ours, ours_field, theirs, theirs_field)                                            \
  _Static_assert(offsetof(struct ours, ours_field) == offsetof(theirs, theirs_field) &&       \
                     sizeof(((struct ours *)0)->ours_field) == sizeof(((theirs *)0)->theirs_field), \
                 #theirs "." #theirs_field)
#define LAST(ours, ours_field, theirs, theirs_field) \
  AT(ours, ours_field, theirs, theirs_field);        \
  _Static_assert(KP_SIZE(ours, ours_field) == PJRT_STRUCT_SIZE(theirs, theirs_field), #theirs)
#define FUNCTION(position, name) \
  _Static_assert(sizeof(struct pjrt_api) + position * sizeof(PjrtFunction) == offsetof(PJRT_Api, name), #name)
#define CODE(name) _Static_assert((int)name == (int)PJRT_Error_Code_##name, #name)

FUNCTION(ERROR_DESTROY, PJRT_Error_Destroy);
FUNCTION(ERROR_GET_CODE, PJRT_Error_GetCode);
FUNCTION(CLIENT_PLATFORM_NAME, PJRT_Client_PlatformName);
FUNCTION(CLIENT_PROCESS_INDEX, PJRT_Client_ProcessIndex);
FUNCTION(CLIENT_PLATFORM_VERSION, PJRT_Client_PlatformVersion);
FUNCTION(CLIENT_DEVICES, PJRT_Client_Devices);
FUNCTION(CLIENT_ADDRESSABLE_DEVICES, PJRT_Client_AddressableDevices);
FUNCTION(CLIENT_COMPILE, PJRT_Client_Compile);
FUNCTION(DESCRIPTION_ID, PJRT_DeviceDescription_Id);
FUNCTION(DESCRIPTION_PROCESS_INDEX, PJRT_DeviceDescription_ProcessIndex);
FUNCTION(DESCRIPTION_KIND, PJRT_DeviceDescription_Kind);
FUNCTION(DESCRIPTION_DEBUG_STRING, PJRT_DeviceDescription_DebugString);
FUNCTION(DEVICE_GET_DESCRIPTION, PJRT_Device_GetDescription);
FUNCTION(EXECUTABLE_DESTROY, PJRT_Executable_Destroy);
FUNCTION(EXECUTABLE_SERIALIZE, PJRT_Executable_Serialize);
FUNCTION(LOADED_GET_EXECUTABLE, PJRT_LoadedExecutable_GetExecutable);
FUNCTION(DESERIALIZE_AND_LOAD, PJRT_Executable_DeserializeAndLoad);

AT(pjrt_api, struct_size, PJRT_Api, struct_size);
AT(pjrt_api, version.major, PJRT_Api, pjrt_api_version.major_version);
AT(pjrt_api, version.minor, PJRT_Api, pjrt_api_version.minor_version);
LAST(error_destroy, error, PJRT_Error_Destroy_Args, error);
AT(error_get_code, error, PJRT_Error_GetCode_Args, error);
LAST(error_get_code, code, PJRT_Error_GetCode_Args, code);
CODE(CANCELLED);
CODE(DEADLINE_EXCEEDED);
CODE(RESOURCE_EXHAUSTED);
CODE(ABORTED);
CODE(UNAVAILABLE);
AT(text_of, of, PJRT_Client_PlatformName_Args, client);
AT(text_of, text, PJRT_Client_PlatformName_Args, platform_name);
LAST(text_of, size, PJRT_Client_PlatformName_Args, platform_name_size);
LAST(text_of, size, PJRT_Client_PlatformVersion_Args, platform_version_size);
LAST(text_of, size, PJRT_DeviceDescription_Kind_Args, device_kind_size);
LAST(text_of, size, PJRT_DeviceDescription_DebugString_Args, debug_string_size);
LAST(number_of, number, PJRT_Client_ProcessIndex_Args, process_index);
LAST(number_of, number, PJRT_DeviceDescription_Id_Args, id);
LAST(number_of, number, PJRT_DeviceDescription_ProcessIndex_Args, process_index);
AT(devices_of, devices, PJRT_Client_Devices_Args, devices);
LAST(devices_of, count, PJRT_Client_Devices_Args, num_devices);
AT(devices_of, devices, PJRT_Client_AddressableDevices_Args, addressable_devices);
LAST(devices_of, count, PJRT_Client_AddressableDevices_Args, num_addressable_devices);
LAST(part_of, part, PJRT_Device_GetDescription_Args, device_description);
LAST(part_of, part, PJRT_LoadedExecutable_GetExecutable_Args, executable);
AT(program, code, PJRT_Program, code);
AT(program, code_size, PJRT_Program, code_size);
AT(program, format, PJRT_Program, format);
LAST(program, format_size, PJRT_Program, format_size);
AT(client_compile, client, PJRT_Client_Compile_Args, client);
AT(client_compile, program, PJRT_Client_Compile_Args, program);
AT(client_compile, options, PJRT_Client_Compile_Args, compile_options);
AT(client_compile, options_size, PJRT_Client_Compile_Args, compile_options_size);
LAST(client_compile, executable, PJRT_Client_Compile_Args, executable);
LAST(executable_destroy, executable, PJRT_Executable_Destroy_Args, executable);
AT(executable_serialize, executable, PJRT_Executable_Serialize_Args, executable);
AT(executable_serialize, bytes, PJRT_Executable_Serialize_Args, serialized_bytes);
AT(executable_serialize, size, PJRT_Executable_Serialize_Args, serialized_bytes_size);
AT(executable_serialize, owner, PJRT_Executable_Serialize_Args, serialized_executable);
LAST(executable_serialize, delete_owner, PJRT_Executable_Serialize_Args, serialized_executable_deleter);
AT(deserialize_and_load, client, PJRT_Executable_DeserializeAndLoad_Args, client);
AT(deserialize_and_load, bytes, PJRT_Executable_DeserializeAndLoad_Args, serialized_executable);
AT(deserialize_and_load, size, PJRT_Executable_DeserializeAndLoad_Args, serialized_executable_size);
AT(deserialize_and_load, executable, PJRT_Executable_DeserializeAndLoad_Args, loaded_executable);
AT(deserialize_and_load, other_options, PJRT_Executable_DeserializeAndLoad_Args, overridden_serialized_compile_options);
LAST(deserialize_and_load, other_options_size, PJRT_Executable_DeserializeAndLoad_Args,
     overridden_serialized_compile_options_size);
