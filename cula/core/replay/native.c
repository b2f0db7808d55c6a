// SPDX-License-Identifier: Apache-2.0
// A repeated call: comparing its tensors with those of a record, allocating what it returns, and handing addresses to functions
// that launch. `record.py` says what is what, compiles this, and does the same where it cannot.
//
// Tensors are read through DLPack's C exchange API (dlpack.h 1.3), which torch has from 2.10 on.

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define MAX_TENSORS 32
#define MAX_OUTPUTS 10
#define MAX_PARTS 64
#define MAX_BYTES 2048
#define MAX_DIMS 8
#define MAX_SIZES 4  // that may differ between calls of one record

// dlpack.h, as far as it is needed

#define DL_FLOAT 2
#define DL_BFLOAT 4

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
static PyObject *is_grad_enabled, *requires_grad, *is_neg;

// 0, or -1 with an exception.
static int read_tensor(PyObject* object, DLTensor* out) {
  if (PyObject_TypeCheck(object, tensor_type)) return api->dltensor_from_py_object_no_sync(object, out);
  PyErr_Format(PyExc_TypeError, "expected a tensor, not %s", Py_TYPE(object)->tp_name);
  return -1;
}

static uint64_t address_of(const DLTensor* t) { return (uint64_t)t->data + t->byte_offset; }

// Kernels are compiled for addresses that are multiples of 16 bytes, or for any: tensors of either kind have records of their own.
static int is_aligned(uint64_t address) { return address % 16 == 0; }

// 1 or 0, or -1 with an exception: what `answer`, which is given up, says.
static int truth_of(PyObject* answer) {
  if (answer == NULL) return -1;
  int truth = PyObject_IsTrue(answer);
  Py_DECREF(answer);
  return truth;
}

// Guard(tensors, labels)(others): the addresses of others if they have the types, shapes, strides, dtypes and devices of the
// tensors, are aligned as they are, and no gradient is asked for; otherwise None
//
// `labels` is None, or says which dimensions may have other sizes: for each tensor None or a number for each dimension. 0: as
// recorded. n > 0: any size, the same for all that have this label; n < 0: one more than label -n. Strides are as recorded, but of a
// dimension whose next one is labelled: then both lie flat, one behind the other.

typedef struct {
  PyTypeObject* type;
  DLTensor form;  // `shape` and `strides` are copies; nothing for None
  int may_be_negated, is_aligned;
  int8_t labels[MAX_DIMS];
} Form;

typedef struct {
  PyObject_VAR_HEAD
  vectorcallfunc vectorcall;
  Form forms[];
} Guard;

// Whether a labelled dimension has the size that its label has in this call, which the first to come decides.
static int has_size(int64_t size, int label, int64_t* sizes) {
  int64_t* known = &sizes[(label > 0 ? label : -label) - 1];
  if (label < 0) size -= 1;
  if (*known < 0) *known = size;
  return size >= 0 && *known == size;
}

static int is_like(const DLTensor* t, const Form* form, int64_t* sizes) {
  const DLTensor* f = &form->form;
  if (t->ndim != f->ndim || t->code != f->code || t->bits != f->bits || t->lanes != f->lanes) return 0;
  if (t->device_type != f->device_type || t->device_id != f->device_id) return 0;
  for (int i = 0; i < t->ndim; ++i) {
    int label = i < MAX_DIMS ? form->labels[i] : 0;
    if (label ? !has_size(t->shape[i], label, sizes) : t->shape[i] != f->shape[i]) return 0;
    int is_flat = i + 1 < t->ndim && i + 1 < MAX_DIMS && form->labels[i + 1];
    if (is_flat ? t->shape[i] > 1 && t->strides[i] != t->shape[i + 1] * t->strides[i + 1] : t->strides[i] != f->strides[i]) return 0;
  }
  return 1;
}

static int has_elements(const DLTensor* t) {
  for (int i = 0; i < t->ndim; ++i)
    if (t->shape[i] == 0) return 0;
  return 1;
}

// A tensor of floats may stand for the negative of what is in its memory, which DLPack does not tell: `z.conj().imag`,
// every other number.
static int may_be_negated(const DLTensor* t) {
  for (int i = 0; i < t->ndim; ++i)
    if (t->shape[i] > 1 && t->strides[i] % 2) return 0;
  return t->code == DL_FLOAT || t->code == DL_BFLOAT;
}

// 1 or 0, or -1 with an exception.
static int needs_grad(PyObject* tensors) {
  int needs = truth_of(PyObject_CallNoArgs(is_grad_enabled));
  if (needs <= 0) return needs;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tensors); ++i) {
    PyObject* t = PyTuple_GET_ITEM(tensors, i);
    if (t != Py_None && (needs = truth_of(PyObject_GetAttr(t, requires_grad))) != 0) return needs;
  }
  return 0;
}

// 1 and addresses, or 0, or -1 with an exception.
static int compare(const Guard* self, PyObject* tensors, uint64_t* at, int64_t* sizes) {
  for (int i = 0; i < MAX_SIZES; ++i) sizes[i] = -1;
  Py_ssize_t n = Py_SIZE(self);
  if (PyTuple_GET_SIZE(tensors) != n) return 0;
  for (Py_ssize_t i = 0; i < n; ++i)  // types first: to read a tensor takes longer
    if (Py_TYPE(PyTuple_GET_ITEM(tensors, i)) != self->forms[i].type) return 0;
  for (Py_ssize_t i = 0; i < n; ++i) {
    PyObject* object = PyTuple_GET_ITEM(tensors, i);
    const Form* form = &self->forms[i];
    DLTensor t;
    at[i] = 0;
    if (object == Py_None) continue;
    if (read_tensor(object, &t) < 0) {  // it has no memory of its own, as in functorch's transforms
      PyErr_Clear();
      return 0;
    }
    if (!is_like(&t, form, sizes)) return 0;
    at[i] = address_of(&t);
    if (at[i] == 0 && has_elements(&t)) return 0;  // the same, in others
    if (is_aligned(at[i]) != form->is_aligned) return 0;
    if (form->may_be_negated) {
      int negated = truth_of(PyObject_CallMethodNoArgs(object, is_neg));
      if (negated != 0) return negated < 0 ? -1 : 0;
    }
  }
  int needs = needs_grad(tensors);
  return needs < 0 ? -1 : !needs;
}

static PyObject* guard_call(PyObject* callable, PyObject* const* args, size_t nargs, PyObject* names) {
  if (PyVectorcall_NARGS(nargs) != 1 || names != NULL || !PyTuple_Check(args[0]))
    return PyErr_Format(PyExc_TypeError, "a Guard takes a tuple of tensors");
  uint64_t at[MAX_TENSORS];
  int64_t sizes[MAX_SIZES];
  int alike = compare((Guard*)callable, args[0], at, sizes);
  if (alike < 0) return NULL;
  if (!alike) Py_RETURN_NONE;
  return PyBytes_FromStringAndSize((const char*)at, 8 * PyTuple_GET_SIZE(args[0]));
}

static void guard_dealloc(PyObject* object) {
  Guard* self = (Guard*)object;
  for (Py_ssize_t i = 0; i < Py_SIZE(self); ++i) {
    Py_XDECREF(self->forms[i].type);
    PyMem_Free(self->forms[i].form.shape);
  }
  PyObject_Free(object);
}

// The labels of a tensor, None or a tuple of numbers. 0, or -1 with an exception.
static int read_labels(PyObject* given, int ndim, int8_t* labels) {
  if (given == Py_None) return 0;
  if (!PyTuple_Check(given) || PyTuple_GET_SIZE(given) != ndim || ndim > MAX_DIMS) {
    PyErr_SetString(PyExc_ValueError, "labels are None or a tuple with a number for each dimension of a tensor");
    return -1;
  }
  for (int i = 0; i < ndim; ++i) {
    long label = PyLong_AsLong(PyTuple_GET_ITEM(given, i));
    if (label == -1 && PyErr_Occurred()) return -1;
    if (label < -MAX_SIZES || label > MAX_SIZES) {
      PyErr_Format(PyExc_ValueError, "more than %d sizes that may differ", MAX_SIZES);
      return -1;
    }
    labels[i] = (int8_t)label;
  }
  return 0;
}

static PyObject* guard_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  PyObject *tensors, *labels = Py_None;
  if (!PyArg_ParseTuple(args, "O!|O", &PyTuple_Type, &tensors, &labels)) return NULL;
  Py_ssize_t n = PyTuple_GET_SIZE(tensors);
  if (labels != Py_None && (!PyTuple_Check(labels) || PyTuple_GET_SIZE(labels) != n))
    return PyErr_Format(PyExc_ValueError, "labels are None or a tuple with those of each tensor");
  if (n > MAX_TENSORS) return PyErr_Format(PyExc_ValueError, "more than %d tensors", MAX_TENSORS);
  Guard* self = PyObject_NewVar(Guard, type, n);
  if (self == NULL) return NULL;
  self->vectorcall = guard_call;
  memset(self->forms, 0, n * sizeof(Form));
  for (Py_ssize_t i = 0; i < n; ++i) {
    PyObject* object = PyTuple_GET_ITEM(tensors, i);
    self->forms[i].type = (PyTypeObject*)Py_NewRef((PyObject*)Py_TYPE(object));
    if (object == Py_None) continue;
    DLTensor t;
    if (read_tensor(object, &t) < 0) goto fail;
    if (t.ndim > 0 && t.strides == NULL) {
      PyErr_SetString(PyExc_ValueError, "a tensor without strides");
      goto fail;
    }
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
    if (labels != Py_None && read_labels(PyTuple_GET_ITEM(labels, i), t.ndim, self->forms[i].labels) < 0) goto fail;
    self->forms[i].may_be_negated = may_be_negated(&t);
    self->forms[i].is_aligned = is_aligned(address_of(&t));
  }
  return (PyObject*)self;
fail:
  Py_DECREF(self);
  return NULL;
}

static PyTypeObject GuardType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "cula_native.Guard",
    .tp_basicsize = sizeof(Guard),
    .tp_itemsize = sizeof(Form),
    .tp_dealloc = guard_dealloc,
    .tp_vectorcall_offset = offsetof(Guard, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_new = guard_new,
};

// Launch(function, block, pointers, stream, places, numbers, keep)(stream, addresses, *outputs): whether the function was called,
// and returned 0. It takes four words, with which the block begins. `numbers` says where in the block those go that differ from call
// to call of one record.

typedef int (*Function)(uint64_t, uint64_t, uint64_t, uint64_t);

typedef struct {
  uint32_t at, to;  // the word at `at` is the address of what is at `to`
} Pointer;

typedef struct {
  int32_t of;         // number of an address; ~0, ~1, ...: of an output
  uint32_t at, mask;  // where it goes, unless it is 0; which of its bits must be 0
  int64_t offset;     // what is added to it
} Place;

typedef struct {
  uint32_t index, at, width;  // which number, where it goes, and in how many bytes
} Number;

typedef struct {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  PyObject* keep;
  Function function;
  Py_ssize_t size, stream, num_pointers, num_places, num_numbers;
  Pointer pointers[MAX_PARTS];
  Place places[MAX_PARTS];
  Number numbers[MAX_PARTS];
  char block[MAX_BYTES];
} Launch;

// 1 if it was called and returned 0, or 0, or -1 with an exception.
static int launch(const Launch* self, uint64_t stream, const uint64_t* at, Py_ssize_t num_at, PyObject* const* outputs,
                  Py_ssize_t num_outputs, const int64_t* numbers, Py_ssize_t num_numbers) {
  // A copy, so that threads may share a Launch.
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
    if (place->of >= num_at || ~place->of >= num_outputs) {
      PyErr_Format(PyExc_TypeError, "this Launch has no tensor number %d", place->of);
      return -1;
    }
    if (place->of >= 0) {
      address = at[place->of];
    } else {
      PyObject* output = outputs[~place->of];
      if (output != Py_None && read_tensor(output, &t) < 0) return -1;
      address = address_of(&t);
    }
    if (address) address += place->offset;
    if (address & place->mask) return 0;
    if (address) memcpy(block + place->at, &address, 8);
  }
  for (Py_ssize_t i = 0; numbers != NULL && i < self->num_numbers; ++i) {
    const Number* number = &self->numbers[i];
    if (number->index >= num_numbers) {
      PyErr_Format(PyExc_TypeError, "this Launch has no number %u", number->index);
      return -1;
    }
    memcpy(block + number->at, &numbers[number->index], number->width);  // little-endian
  }
  uint64_t words[4];
  memcpy(words, block, sizeof(words));
  int status;
  Py_BEGIN_ALLOW_THREADS;
  status = self->function(words[0], words[1], words[2], words[3]);
  Py_END_ALLOW_THREADS;
  if (status == 0) return 1;
  return PyErr_Occurred() ? -1 : 0;
}

static PyObject* launch_call(PyObject* callable, PyObject* const* args, size_t nargs, PyObject* names) {
  Py_ssize_t num_outputs = PyVectorcall_NARGS(nargs) - 2;
  if (num_outputs < 0 || names != NULL || !PyBytes_Check(args[1]))
    return PyErr_Format(PyExc_TypeError, "a Launch takes a stream, addresses and outputs");
  uint64_t stream = PyLong_AsUnsignedLongLong(args[0]);
  if (stream == (uint64_t)-1 && PyErr_Occurred()) return NULL;
  const uint64_t* at = (const uint64_t*)PyBytes_AS_STRING(args[1]);
  int launched = launch((Launch*)callable, stream, at, PyBytes_GET_SIZE(args[1]) / 8, args + 2, num_outputs, NULL, 0);
  return launched < 0 ? NULL : PyBool_FromLong(launched);
}

static void launch_dealloc(PyObject* object) {
  Py_XDECREF(((Launch*)object)->keep);
  PyObject_Free(object);
}

static PyObject* launch_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  unsigned long long function;
  const char* block;
  Py_ssize_t size, stream, at, to, of, alignment, offset, index, width;
  PyObject *pointers, *places, *numbers, *keep;
  if (!PyArg_ParseTuple(args, "Ky#O!nO!O!O", &function, &block, &size, &PyTuple_Type, &pointers, &stream, &PyTuple_Type, &places,
                        &PyTuple_Type, &numbers, &keep))
    return NULL;
  Py_ssize_t num_pointers = PyTuple_GET_SIZE(pointers), num_places = PyTuple_GET_SIZE(places), last = size - 8;
  Py_ssize_t num_numbers = PyTuple_GET_SIZE(numbers);
  if (size < 32 || size > MAX_BYTES || num_pointers > MAX_PARTS || num_places > MAX_PARTS || num_numbers > MAX_PARTS)
    return PyErr_Format(PyExc_ValueError, "a block, pointers, places or numbers too many");
  Launch* self = PyObject_New(Launch, type);
  if (self == NULL) return NULL;
  self->vectorcall = launch_call;
  self->keep = Py_NewRef(keep);
  self->function = (Function)function;
  self->size = size, self->stream = stream, self->num_pointers = num_pointers, self->num_places = num_places;
  self->num_numbers = num_numbers;
  memcpy(self->block, block, size);
  if (stream < 0 || stream > last) goto outside;
  for (Py_ssize_t i = 0; i < num_pointers; ++i) {
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(pointers, i), "nn", &at, &to)) goto fail;
    if (at < 0 || at > last || to < 0 || to > size) goto outside;
    self->pointers[i] = (Pointer){at, to};
  }
  for (Py_ssize_t i = 0; i < num_places; ++i) {
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(places, i), "nnnn", &of, &at, &alignment, &offset)) goto fail;
    if (at < 0 || at > last || of != (int32_t)of || alignment < 1 || alignment & (alignment - 1)) goto outside;
    self->places[i] = (Place){of, at, alignment - 1, offset};
  }
  for (Py_ssize_t i = 0; i < num_numbers; ++i) {
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(numbers, i), "nnn", &index, &at, &width)) goto fail;
    if (at < 0 || index < 0 || (width != 4 && width != 8) || at > size - width) goto outside;
    self->numbers[i] = (Number){index, at, width};
  }
  return (PyObject*)self;
outside:
  PyErr_SetString(PyExc_ValueError, "a stream, a pointer, a place or a number that is not in the block, or an odd alignment");
fail:
  Py_DECREF(self);
  return NULL;
}

static PyTypeObject LaunchType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "cula_native.Launch",
    .tp_basicsize = sizeof(Launch),
    .tp_dealloc = launch_dealloc,
    .tp_vectorcall_offset = offsetof(Launch, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_new = launch_new,
};

// Record(guard, calls, outputs, workspace, is_ready, device, current_device, current_stream, empty, elsewhere, resize)(tensors):
// the outputs, NotImplemented for tensors that are not alike, None where a launch was not made
//
// `resize`, where it is not None, is asked for (numbers, outputs, workspace) with the sizes that labels stand for, when those are
// others than in the call before; None from it says that the record does not serve such a call.

typedef struct {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  PyObject* parts;  // what it was made of: a tuple of the following
  PyObject *guard, *calls, *outputs, *workspace, *is_ready, *device, *current_device, *current_stream, *empty, *elsewhere, *resize;
  PyObject* resized;  // (sizes as bytes, numbers as bytes, outputs, workspace) of the call before; replaced, never changed
} Record;

// 1 or 0, or -1 with an exception.
static int is_on_device(const Record* self) {
  PyObject* current = PyObject_CallNoArgs(self->current_device);
  if (current == NULL) return -1;
  int same = PyObject_RichCompareBool(current, self->device, Py_EQ);
  Py_DECREF(current);
  return same;
}

// The output that `how` is for: the number of a tensor of the call, what `empty` makes it from, or None.
static PyObject* output(const Record* self, PyObject* how, PyObject* tensors) {
  if (how == Py_None) return Py_NewRef(Py_None);
  if (PyTuple_Check(how)) return PyObject_Call(self->empty, how, NULL);
  Py_ssize_t i = PyLong_AsSsize_t(how);
  if (i == -1 && PyErr_Occurred()) return NULL;
  if (i < 0 || i >= PyTuple_GET_SIZE(tensors)) return PyErr_Format(PyExc_TypeError, "this Record has no tensor number %zd", i);
  return Py_NewRef(PyTuple_GET_ITEM(tensors, i));
}

// What a call of these sizes needs, as `resized` has it, with a reference; Py_None where the record does not serve it, or NULL with an
// exception. `resized` is replaced as a whole, so that a thread that reads it has what belongs together.
static PyObject* resized_for(Record* self, const int64_t* sizes) {
  PyObject* known = self->resized;
  if (known != NULL && memcmp(PyBytes_AS_STRING(PyTuple_GET_ITEM(known, 0)), sizes, MAX_SIZES * sizeof(int64_t)) == 0)
    return Py_NewRef(known);
  PyObject* arguments[MAX_SIZES] = {NULL};
  PyObject *found = NULL, *made = NULL;
  Py_ssize_t n = 0;
  for (; n < MAX_SIZES && sizes[n] >= 0; ++n)
    if ((arguments[n] = PyLong_FromLongLong(sizes[n])) == NULL) goto done;
  found = PyObject_Vectorcall(self->resize, arguments, n, NULL);
  if (found == NULL || found == Py_None) goto done;
  if (!PyTuple_Check(found) || PyTuple_GET_SIZE(found) != 3 || !PyTuple_Check(PyTuple_GET_ITEM(found, 0)) ||
      !PyTuple_Check(PyTuple_GET_ITEM(found, 1)) ||
      PyTuple_GET_SIZE(PyTuple_GET_ITEM(found, 1)) != PyTuple_GET_SIZE(self->outputs) ||
      PyTuple_GET_SIZE(PyTuple_GET_ITEM(found, 0)) > MAX_PARTS) {
    PyErr_SetString(PyExc_TypeError, "resize returns numbers, as many outputs as the record has, and a workspace; or None");
    goto done;
  }
  PyObject* given = PyTuple_GET_ITEM(found, 0);
  int64_t numbers[MAX_PARTS];
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(given); ++i) {
    numbers[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(given, i));
    if (numbers[i] == -1 && PyErr_Occurred()) goto done;
  }
  made = Py_BuildValue("(y#y#OO)", (const char*)sizes, (Py_ssize_t)(MAX_SIZES * sizeof(int64_t)), (const char*)numbers,
                       (Py_ssize_t)(PyTuple_GET_SIZE(given) * sizeof(int64_t)), PyTuple_GET_ITEM(found, 1),
                       PyTuple_GET_ITEM(found, 2));
  if (made == NULL) goto done;
  PyObject* old = self->resized;
  self->resized = Py_NewRef(made);
  Py_XDECREF(old);
done:
  while (n > 0) Py_XDECREF(arguments[--n]);
  if (made == NULL && found == Py_None) return found;
  Py_XDECREF(found);
  return made;
}

static PyObject* record_call(PyObject* callable, PyObject* const* args, size_t nargs, PyObject* names) {
  Record* self = (Record*)callable;
  if (PyVectorcall_NARGS(nargs) != 1 || names != NULL || !PyTuple_Check(args[0]))
    return PyErr_Format(PyExc_TypeError, "a Record takes a tuple of tensors");
  PyObject* tensors = args[0];
  uint64_t at[MAX_TENSORS];
  int64_t sizes[MAX_SIZES];
  int fits = compare((Guard*)self->guard, tensors, at, sizes);
  if (fits < 0) return NULL;
  if (!fits) Py_RETURN_NOTIMPLEMENTED;
  int is_ready = self->is_ready == Py_None ? 1 : truth_of(PyObject_CallNoArgs(self->is_ready));
  if (is_ready < 0) return NULL;
  if (!is_ready) Py_RETURN_NONE;
  int is_here = is_on_device(self);
  if (is_here < 0) return NULL;
  if (!is_here) return PyObject_CallFunctionObjArgs(self->elsewhere, self->device, callable, tensors, NULL);

  PyObject *outputs = self->outputs, *workspace = self->workspace, *resized = NULL;
  const int64_t* numbers = NULL;
  Py_ssize_t num_numbers = 0;
  if (self->resize != Py_None) {
    resized = resized_for(self, sizes);
    if (resized == NULL) return NULL;
    if (resized == Py_None) {
      Py_DECREF(resized);
      Py_RETURN_NOTIMPLEMENTED;
    }
    numbers = (const int64_t*)PyBytes_AS_STRING(PyTuple_GET_ITEM(resized, 1));
    num_numbers = PyBytes_GET_SIZE(PyTuple_GET_ITEM(resized, 1)) / (Py_ssize_t)sizeof(int64_t);
    outputs = PyTuple_GET_ITEM(resized, 2);
    workspace = PyTuple_GET_ITEM(resized, 3);
  }
  PyObject* made[MAX_OUTPUTS + 1];  // outputs, then a workspace
  PyObject* result = NULL;
  Py_ssize_t n = 0, num_outputs = PyTuple_GET_SIZE(outputs);
  PyObject* stream = PyObject_CallOneArg(self->current_stream, self->device);
  if (stream == NULL) goto done;
  uint64_t stream_number = PyLong_AsUnsignedLongLong(stream);
  if (stream_number == (uint64_t)-1 && PyErr_Occurred()) goto done;
  for (; n < num_outputs; ++n)
    if ((made[n] = output(self, PyTuple_GET_ITEM(outputs, n), tensors)) == NULL) goto done;
  if (workspace != Py_None) {
    if ((made[n] = PyObject_CallOneArg(workspace, stream)) == NULL) goto done;
    ++n;
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(self->calls); ++i) {
    int launched = launch((Launch*)PyTuple_GET_ITEM(self->calls, i), stream_number, at, PyTuple_GET_SIZE(tensors), made, n, numbers,
                          num_numbers);
    if (launched == 0) result = Py_NewRef(Py_None);
    if (launched <= 0) goto done;
  }
  result = PyTuple_New(num_outputs);
  if (result == NULL) goto done;
  for (Py_ssize_t i = 0; i < num_outputs; ++i) PyTuple_SET_ITEM(result, i, Py_NewRef(made[i]));
done:
  while (n > 0) Py_DECREF(made[--n]);
  Py_XDECREF(stream);
  Py_XDECREF(resized);
  return result;
}

static void record_dealloc(PyObject* object) {
  Py_DECREF(((Record*)object)->parts);
  Py_XDECREF(((Record*)object)->resized);
  PyObject_Free(object);
}

static PyObject* record_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  Record p;
  if (!PyArg_ParseTuple(args, "O!O!O!OOOOOOOO", &GuardType, &p.guard, &PyTuple_Type, &p.calls, &PyTuple_Type, &p.outputs,
                        &p.workspace, &p.is_ready, &p.device, &p.current_device, &p.current_stream, &p.empty, &p.elsewhere,
                        &p.resize))
    return NULL;
  if (PyTuple_GET_SIZE(p.outputs) > MAX_OUTPUTS) return PyErr_Format(PyExc_ValueError, "more than %d outputs", MAX_OUTPUTS);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(p.calls); ++i)
    if (!Py_IS_TYPE(PyTuple_GET_ITEM(p.calls, i), &LaunchType)) return PyErr_Format(PyExc_TypeError, "expected a tuple of Launches");
  Record* self = PyObject_New(Record, type);
  if (self == NULL) return NULL;
  p.ob_base = self->ob_base;
  p.vectorcall = record_call;
  p.parts = Py_NewRef(args);
  p.resized = NULL;
  *self = p;
  return (PyObject*)self;
}

static PyTypeObject RecordType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "cula_native.Record",
    .tp_basicsize = sizeof(Record),
    .tp_dealloc = record_dealloc,
    .tp_vectorcall_offset = offsetof(Record, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_new = record_new,
};

// first(known, tensors, static_args): what the first of the known that has these static arguments, a pair of those and a function, makes of the
// tensors and is not NotImplemented

static PyObject* first(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  if (nargs != 3 || !PyTuple_Check(args[0])) return PyErr_Format(PyExc_TypeError, "first takes a tuple, tensors and static arguments");
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args[0]); ++i) {
    PyObject* pair = PyTuple_GET_ITEM(args[0], i);
    if (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2) return PyErr_Format(PyExc_TypeError, "expected pairs");
    int same = PyObject_RichCompareBool(PyTuple_GET_ITEM(pair, 0), args[2], Py_EQ);
    if (same < 0) return NULL;
    if (!same) continue;
    PyObject* done = PyObject_CallOneArg(PyTuple_GET_ITEM(pair, 1), args[1]);
    if (done != Py_NotImplemented) return done;
    Py_DECREF(done);
  }
  Py_RETURN_NOTIMPLEMENTED;
}

static PyMethodDef methods[] = {{"first", (PyCFunction)(void*)first, METH_FASTCALL, NULL}, {NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "cula_native", .m_size = -1, .m_methods = methods};

PyMODINIT_FUNC PyInit_cula_native(void) {
  PyObject* torch = PyImport_ImportModule("torch");
  if (torch == NULL) return NULL;
  tensor_type = (PyTypeObject*)PyObject_GetAttrString(torch, "Tensor");
  is_grad_enabled = PyObject_GetAttrString(torch, "is_grad_enabled");
  requires_grad = PyUnicode_InternFromString("requires_grad");
  is_neg = PyUnicode_InternFromString("is_neg");
  Py_DECREF(torch);
  if (tensor_type == NULL || is_grad_enabled == NULL || requires_grad == NULL || is_neg == NULL) return NULL;
  PyObject* capsule = PyObject_GetAttrString((PyObject*)tensor_type, "__dlpack_c_exchange_api__");
  api = capsule == NULL ? NULL : PyCapsule_GetPointer(capsule, "dlpack_exchange_api");  // the capsule is kept, and so this
  if (api == NULL || api->major != 1 || api->dltensor_from_py_object_no_sync == NULL) {
    PyErr_SetString(PyExc_ImportError, "this torch has no DLPack exchange API of version 1");
    return NULL;
  }
  if (PyType_Ready(&GuardType) < 0 || PyType_Ready(&LaunchType) < 0 || PyType_Ready(&RecordType) < 0) return NULL;
  PyObject* m = PyModule_Create(&module);
  if (m == NULL || PyModule_AddObjectRef(m, "Guard", (PyObject*)&GuardType) < 0 ||
      PyModule_AddObjectRef(m, "Launch", (PyObject*)&LaunchType) < 0 || PyModule_AddObjectRef(m, "Record", (PyObject*)&RecordType) < 0) {
    Py_XDECREF(m);
    return NULL;
  }
  return m;
}
