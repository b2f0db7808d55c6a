// SPDX-License-Identifier: Apache-2.0
// The two steps of a repeated call that take Python microseconds: comparing tensors with those of a plan, and handing their
// addresses to a function that launches. `native.py` compiles this, and does the same where it cannot.
//
// Tensors are read through DLPack's C exchange API (dlpack.h 1.3), which torch has from 2.10 on.

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define MAX_TENSORS 32
#define MAX_PARTS 64
#define MAX_BYTES 2048

// dlpack.h, as far as it is needed

typedef struct {
  void* data;
  int32_t device_type, device_id;
  int32_t ndim;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
} DLTensor;

typedef struct {
  uint32_t major, minor;
  void* prev_api;
  void* managed_tensor_allocator;
  void* managed_tensor_from_py_object_no_sync;
  void* managed_tensor_to_py_object_no_sync;
  int (*dltensor_from_py_object_no_sync)(void* object, DLTensor* out);
  void* current_work_stream;
} DLPackExchangeAPI;

static const DLPackExchangeAPI* api;
static PyTypeObject* tensor_type;
static PyObject *is_grad_enabled, *requires_grad;

// 0, or -1 with an exception.
static int read_tensor(PyObject* object, DLTensor* out) {
  if (PyObject_TypeCheck(object, tensor_type)) return api->dltensor_from_py_object_no_sync(object, out);
  PyErr_Format(PyExc_TypeError, "expected a tensor, not %s", Py_TYPE(object)->tp_name);
  return -1;
}

static uint64_t address_of(const DLTensor* t) { return (uint64_t)t->data + t->byte_offset; }

// addresses(tensors): as bytes, 8 for each, 0 for None

static PyObject* addresses(PyObject* self, PyObject* tensors) {
  if (!PyTuple_Check(tensors)) return PyErr_Format(PyExc_TypeError, "expected a tuple of tensors");
  PyObject* bytes = PyBytes_FromStringAndSize(NULL, 8 * PyTuple_GET_SIZE(tensors));
  if (bytes == NULL) return NULL;
  uint64_t* at = (uint64_t*)PyBytes_AS_STRING(bytes);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tensors); ++i) {
    PyObject* object = PyTuple_GET_ITEM(tensors, i);
    DLTensor t = {0};
    if (object != Py_None && read_tensor(object, &t) < 0) {
      Py_DECREF(bytes);
      return NULL;
    }
    at[i] = address_of(&t);
  }
  return bytes;
}

// Likeness(tensors)(others): the addresses of others if they have the types, shapes, strides, dtypes and devices of the
// tensors and no gradient is asked for; otherwise None

typedef struct {
  PyTypeObject* type;
  DLTensor form;  // `shape` and `strides` are copies; nothing for None
} Form;

typedef struct {
  PyObject_VAR_HEAD
  vectorcallfunc vectorcall;
  Form forms[];
} Likeness;

static int is_like(const DLTensor* t, const DLTensor* f) {
  if (t->ndim != f->ndim || t->code != f->code || t->bits != f->bits || t->lanes != f->lanes) return 0;
  if (t->device_type != f->device_type || t->device_id != f->device_id) return 0;
  for (int i = 0; i < t->ndim; ++i)
    if (t->shape[i] != f->shape[i] || t->strides[i] != f->strides[i]) return 0;
  return 1;
}

// 1 or 0, or -1 with an exception.
static int needs_grad(PyObject* tensors) {
  PyObject* answer = PyObject_CallNoArgs(is_grad_enabled);
  if (answer == NULL) return -1;
  int needs = answer == Py_True;
  Py_DECREF(answer);
  if (!needs) return 0;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tensors); ++i) {
    PyObject* t = PyTuple_GET_ITEM(tensors, i);
    if (t == Py_None) continue;
    answer = PyObject_GetAttr(t, requires_grad);
    if (answer == NULL) return -1;
    needs = answer == Py_True;
    Py_DECREF(answer);
    if (needs) return 1;
  }
  return 0;
}

static PyObject* likeness_call(PyObject* callable, PyObject* const* args, size_t nargs, PyObject* names) {
  Likeness* self = (Likeness*)callable;
  Py_ssize_t n = Py_SIZE(self);
  if (PyVectorcall_NARGS(nargs) != 1 || names != NULL || !PyTuple_Check(args[0]))
    return PyErr_Format(PyExc_TypeError, "a Likeness takes a tuple of tensors");
  if (PyTuple_GET_SIZE(args[0]) != n) Py_RETURN_NONE;
  for (Py_ssize_t i = 0; i < n; ++i)  // types first: to read a tensor takes longer
    if (Py_TYPE(PyTuple_GET_ITEM(args[0], i)) != self->forms[i].type) Py_RETURN_NONE;
  uint64_t at[MAX_TENSORS] = {0};
  for (Py_ssize_t i = 0; i < n; ++i) {
    PyObject* object = PyTuple_GET_ITEM(args[0], i);
    DLTensor t;
    if (object == Py_None) continue;
    if (read_tensor(object, &t) < 0) {  // it has no memory of its own, as in functorch's transforms
      PyErr_Clear();
      Py_RETURN_NONE;
    }
    if (!is_like(&t, &self->forms[i].form)) Py_RETURN_NONE;
    at[i] = address_of(&t);
  }
  int needs = needs_grad(args[0]);
  if (needs < 0) return NULL;
  if (needs) Py_RETURN_NONE;
  return PyBytes_FromStringAndSize((const char*)at, 8 * n);
}

static void likeness_dealloc(PyObject* object) {
  Likeness* self = (Likeness*)object;
  for (Py_ssize_t i = 0; i < Py_SIZE(self); ++i) {
    Py_XDECREF(self->forms[i].type);
    PyMem_Free(self->forms[i].form.shape);
  }
  PyObject_Free(object);
}

static PyObject* likeness_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  PyObject* tensors;
  if (!PyArg_ParseTuple(args, "O!", &PyTuple_Type, &tensors)) return NULL;
  Py_ssize_t n = PyTuple_GET_SIZE(tensors);
  if (n > MAX_TENSORS) return PyErr_Format(PyExc_ValueError, "more than %d tensors", MAX_TENSORS);
  Likeness* self = PyObject_NewVar(Likeness, type, n);
  if (self == NULL) return NULL;
  self->vectorcall = likeness_call;
  memset(self->forms, 0, n * sizeof(Form));
  for (Py_ssize_t i = 0; i < n; ++i) {
    PyObject* object = PyTuple_GET_ITEM(tensors, i);
    self->forms[i].type = (PyTypeObject*)Py_NewRef((PyObject*)Py_TYPE(object));
    if (object == Py_None) continue;
    DLTensor t;
    if (read_tensor(object, &t) < 0) goto fail;
    int64_t* sizes = PyMem_Malloc(2 * t.ndim * sizeof(int64_t));
    if (sizes == NULL) {
      PyErr_NoMemory();
      goto fail;
    }
    memcpy(sizes, t.shape, t.ndim * sizeof(int64_t));
    memcpy(sizes + t.ndim, t.strides, t.ndim * sizeof(int64_t));
    t.shape = sizes;
    t.strides = sizes + t.ndim;
    self->forms[i].form = t;
  }
  return (PyObject*)self;
fail:
  Py_DECREF(self);
  return NULL;
}

static PyTypeObject LikenessType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "cula_native.Likeness",
    .tp_basicsize = sizeof(Likeness),
    .tp_itemsize = sizeof(Form),
    .tp_dealloc = likeness_dealloc,
    .tp_vectorcall_offset = offsetof(Likeness, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_new = likeness_new,
};

// Call(function, block, pointers, stream, places, keep)(stream, addresses, *outputs): whether the function was called, and
// returned 0. It takes four words, with which the block begins.

typedef int (*Function)(uint64_t, uint64_t, uint64_t, uint64_t);

typedef struct {
  uint32_t at, to;  // the word at `at` is the address of what is at `to`
} Pointer;

typedef struct {
  int32_t of;         // number of an address; ~0, ~1, ...: of an output
  uint32_t at, mask;  // where it goes, unless it is 0; which of its bits must be 0
} Place;

typedef struct {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  PyObject* keep;
  Function function;
  Py_ssize_t size, stream, num_pointers, num_places;
  Pointer pointers[MAX_PARTS];
  Place places[MAX_PARTS];
  char block[MAX_BYTES];
} Call;

static PyObject* call_call(PyObject* callable, PyObject* const* args, size_t nargs, PyObject* names) {
  const Call* self = (Call*)callable;
  Py_ssize_t num_outputs = PyVectorcall_NARGS(nargs) - 2;
  if (num_outputs < 0 || names != NULL || !PyBytes_Check(args[1]))
    return PyErr_Format(PyExc_TypeError, "a Call takes a stream, addresses and outputs");
  uint64_t stream = PyLong_AsUnsignedLongLong(args[0]);
  if (stream == (uint64_t)-1 && PyErr_Occurred()) return NULL;
  const uint64_t* given = (const uint64_t*)PyBytes_AS_STRING(args[1]);
  Py_ssize_t num_given = PyBytes_GET_SIZE(args[1]) / 8;

  // A copy, so that threads may share a Call.
  _Alignas(16) char block[MAX_BYTES];
  memcpy(block, self->block, self->size);
  memcpy(block + self->stream, &stream, 8);
  for (Py_ssize_t i = 0; i < self->num_pointers; ++i) {
    uint64_t to = (uint64_t)(block + self->pointers[i].to);
    memcpy(block + self->pointers[i].at, &to, 8);
  }
  for (Py_ssize_t i = 0; i < self->num_places; ++i) {
    const Place* place = &self->places[i];
    DLTensor t = {0};
    uint64_t address;
    if (place->of >= num_given || ~place->of >= num_outputs)
      return PyErr_Format(PyExc_TypeError, "this Call has no tensor number %d", place->of);
    if (place->of >= 0) {
      address = given[place->of];
    } else {
      PyObject* output = args[2 + ~place->of];
      if (output != Py_None && read_tensor(output, &t) < 0) return NULL;
      address = address_of(&t);
    }
    if (address & place->mask) Py_RETURN_FALSE;
    if (address) memcpy(block + place->at, &address, 8);
  }
  uint64_t words[4];
  memcpy(words, block, sizeof(words));
  int status;
  Py_BEGIN_ALLOW_THREADS;
  status = self->function(words[0], words[1], words[2], words[3]);
  Py_END_ALLOW_THREADS;
  return PyBool_FromLong(status == 0);
}

static void call_dealloc(PyObject* object) {
  Py_XDECREF(((Call*)object)->keep);
  PyObject_Free(object);
}

static PyObject* call_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  unsigned long long function;
  const char* block;
  Py_ssize_t size, stream, at, to, of, alignment;
  PyObject *pointers, *places, *keep;
  if (!PyArg_ParseTuple(args, "Ky#O!nO!O", &function, &block, &size, &PyTuple_Type, &pointers, &stream, &PyTuple_Type, &places, &keep))
    return NULL;
  Py_ssize_t num_pointers = PyTuple_GET_SIZE(pointers), num_places = PyTuple_GET_SIZE(places), last = size - 8;
  if (size < 32 || size > MAX_BYTES || num_pointers > MAX_PARTS || num_places > MAX_PARTS)
    return PyErr_Format(PyExc_ValueError, "a block, pointers or places too many");
  Call* self = PyObject_New(Call, type);
  if (self == NULL) return NULL;
  self->vectorcall = call_call;
  self->keep = Py_NewRef(keep);
  self->function = (Function)function;
  self->size = size, self->stream = stream, self->num_pointers = num_pointers, self->num_places = num_places;
  memcpy(self->block, block, size);
  if (stream < 0 || stream > last) goto outside;
  for (Py_ssize_t i = 0; i < num_pointers; ++i) {
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(pointers, i), "nn", &at, &to)) goto fail;
    if (at < 0 || at > last || to < 0 || to > size) goto outside;
    self->pointers[i] = (Pointer){at, to};
  }
  for (Py_ssize_t i = 0; i < num_places; ++i) {
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(places, i), "nnn", &of, &at, &alignment)) goto fail;
    if (at < 0 || at > last || of != (int32_t)of || alignment < 1 || alignment & (alignment - 1)) goto outside;
    self->places[i] = (Place){of, at, alignment - 1};
  }
  return (PyObject*)self;
outside:
  PyErr_SetString(PyExc_ValueError, "a stream, a pointer or a place that is not in the block, or an odd alignment");
fail:
  Py_DECREF(self);
  return NULL;
}

static PyTypeObject CallType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "cula_native.Call",
    .tp_basicsize = sizeof(Call),
    .tp_dealloc = call_dealloc,
    .tp_vectorcall_offset = offsetof(Call, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_new = call_new,
};

static PyMethodDef methods[] = {{"addresses", addresses, METH_O, NULL}, {NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "cula_native", .m_size = -1, .m_methods = methods};

PyMODINIT_FUNC PyInit_cula_native(void) {
  PyObject* torch = PyImport_ImportModule("torch");
  if (torch == NULL) return NULL;
  tensor_type = (PyTypeObject*)PyObject_GetAttrString(torch, "Tensor");
  is_grad_enabled = PyObject_GetAttrString(torch, "is_grad_enabled");
  requires_grad = PyUnicode_InternFromString("requires_grad");
  Py_DECREF(torch);
  if (tensor_type == NULL || is_grad_enabled == NULL || requires_grad == NULL) return NULL;
  PyObject* capsule = PyObject_GetAttrString((PyObject*)tensor_type, "__dlpack_c_exchange_api__");
  api = capsule == NULL ? NULL : PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
  if (api == NULL || api->major != 1 || api->dltensor_from_py_object_no_sync == NULL) {
    PyErr_SetString(PyExc_ImportError, "this torch has no DLPack exchange API of version 1");
    return NULL;
  }
  if (PyType_Ready(&LikenessType) < 0 || PyType_Ready(&CallType) < 0) return NULL;
  PyObject* m = PyModule_Create(&module);
  if (m == NULL || PyModule_AddObjectRef(m, "Likeness", (PyObject*)&LikenessType) < 0 ||
      PyModule_AddObjectRef(m, "Call", (PyObject*)&CallType) < 0)
    return NULL;
  return m;
}
